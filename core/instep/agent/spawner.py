"""Starts births: through the fork server where possible, else as plain interpreters. The agent's end of both."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from instep.agent.forkserver import PACKET, kill_group
from instep.agent.procfs import exit_code
from instep.agent.remains import Remains
from instep.agent.task import Fds, Task


class Listener(Protocol):
    """Who is told about processes."""

    def on_born(self, number: int, pid: int, pidfd: int) -> None:
        """The process for request ``number`` exists; the pidfd is handed over."""

    def on_exit(self, pid: int, code: int | None) -> None:
        """A process is dead, its group is killed, and its number may be used again."""

    def on_server_lost(self, why: str) -> None:
        """The fork server is gone."""


@dataclass(frozen=True)
class Warmth:
    """What the fork server imports (``name.*``: with all submodules), with ``path`` in front of ``sys.path`` meanwhile.

    ``plugins`` is the configuration's table of plugins in JSON; workers inherit them loaded.
    """

    modules: Sequence[str]
    path: Sequence[str]
    plugins: str


class Server:
    """The process of a fork server, and the socket to it. May serve several jobs of this process, one after the other."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "instep.agent.forkserver", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(command, env=dict(env), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.sock.setblocking(False)
        self.ready = self.stopped = False

    def stop(self) -> None:
        """Let it kill its workers and end."""
        self.stopped = True
        self.sock.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ForkServer:
    """A fork server as one job uses it."""

    def __init__(self, server: Server, listener: Listener) -> None:
        self._server, self._listener = server, listener
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[tuple[str | None, list[str]]] = self._loop.create_future()
        self._sock = server.sock
        self.alive = True
        self._loop.add_reader(self._sock, self._read)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._server.process.pid

    async def warm(self, warmth: Warmth) -> tuple[str | None, list[str]]:
        """Import once; returns what stands against forking, if anything, and what could not be imported."""
        if self._server.ready:
            return None, []
        self._tell({"t": "warm", "modules": list(warmth.modules), "path": list(warmth.path), "plugins": warmth.plugins}, [])
        problem, missing = await self._ready
        self._server.ready = problem is None
        return problem, missing

    def spawn(self, number: int, fds: Fds) -> bool:
        """Ask for a worker; false when the server does not even take the request."""
        return self.alive and self._tell({"t": "spawn", "id": number}, list(fds))

    def check(self) -> bool:
        """Whether the server is alive right now; tells the listener when it is not any more."""
        if self.alive and self._server.process.poll() is not None:
            self._read()
            self._lost()
        return self.alive

    def leave(self) -> None:
        """This job is over; the server stays."""
        if self.alive:
            self._loop.remove_reader(self._sock)
        self.alive = False

    def _tell(self, message: Mapping[str, object], fds: list[int]) -> bool:
        try:
            socket.send_fds(self._sock, [json.dumps(message).encode()], fds)
        except OSError:
            return False
        return True

    def _read(self) -> None:
        while self.alive:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lost()
                return
            self._take(json.loads(data), fds)

    def _take(self, message: Mapping[str, object], fds: Sequence[int]) -> None:
        match message:
            case {"t": "born", "id": int(number), "pid": int(pid)}:
                self._listener.on_born(number, pid, fds[0])
            case {"t": "exited", "pid": int(pid), "code": int(code)}:
                self._listener.on_exit(pid, code)
            case {"t": "ready", "problem": str() | None as problem, "missing": list(missing)} if not self._ready.done():
                self._ready.set_result((problem, [str(m) for m in missing]))

    def _lost(self) -> None:
        if not self.alive:
            return
        self.leave()
        self._server.stop()
        code = self._server.process.returncode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        if self._server.ready:
            self._listener.on_server_lost(f"the fork server ended by {how}, and its workers with it")
        elif not self._ready.done():
            self._ready.set_result((f"the fork server ended by {how} while it imported", []))


class Interpreters:
    """Starts workers as plain interpreters, children of the agent."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._remains = Remains()

    def spawn(self, number: int, task: Task, fds: Fds) -> None:
        """Start a worker; the listener hears of it before this returns."""
        command = [sys.executable, "-m", "instep.agent.child", *map(str, fds), str(os.getpid())]
        process = subprocess.Popen(command, env=dict(task.env), pass_fds=list(fds), stdin=subprocess.DEVNULL, process_group=0)
        self._running[process.pid] = process
        self._listener.on_born(number, process.pid, os.pidfd_open(process.pid))

    def reap(self, pid: int) -> bool:
        """Tell the listener how a process ended, if it is one of these."""
        process = self._running.pop(pid, None)
        if process is None:
            return False
        self._remains.note(pid)
        kill_group(pid)
        self._listener.on_exit(pid, process.wait())
        self._remains.clear()
        return True


def bury_unreaped(pid: int, listener: Listener, *, last: bool) -> None:
    """A worker is dead, but its parent, the fork server, does not answer: find out how it ended, and kill its group.

    ``last``: say that it is dead even if nobody can tell how.
    """
    code = exit_code(pid)
    if code is not None:
        kill_group(pid)
    if code is not None or last:
        listener.on_exit(pid, code)
