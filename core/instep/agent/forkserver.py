"""The fork server: one warm, single-threaded process from which every birth of a rank is forked in milliseconds.

``python -m instep.agent.forkserver FD PID``, where FD is a SOCK_SEQPACKET socket to the agent, PID the agent. One JSON object a packet:
``warm`` {modules, path} -> ``ready`` {problem, missing}; ``spawn`` {id} with the file descriptors of ``task.Fds`` ->
``born`` {id, pid} with a pidfd; ``exited`` {pid, code} when a worker is dead and its process group is killed.

One spare process is kept, forked while nothing else happens, in which a step was rehearsed: a worker that is asked for is that process.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType

from instep.agent.child import become, die_with_parent, run
from instep.agent.procfs import threads
from instep.agent.remains import Remains
from instep.agent.spare import Spare
from instep.agent.task import Fds

PACKET = 1 << 16

_REST = 1.0
"""Seconds without a request after which the next spare is forked."""

_LAST = 0.5
"""Seconds that the server waits at its end for those it killed, to remove what they left."""


class _Server:
    """Forks on request until the agent is gone. Once warm it gets a signal then, so that it can still kill what its workers started."""

    def __init__(self, sock: socket.socket, agent: int) -> None:
        self._sock, self._agent = sock, agent
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._workers: dict[int, int] = {}
        self._spare: Spare | None = None
        self._warm = False
        self._remains = Remains()

    def serve(self) -> Fds | None:
        """Returns in a new worker with its file descriptors, and in the server with ``None`` when the agent is gone."""
        while True:
            resting = self._warm and bool(self._workers) and self._spare is None
            ready = self._poll.poll(1e3 * _REST if resting else None)
            if not ready and (fds := self._breed()):
                return Fds(*fds)
            for fd, _ in ready:
                if fd != self._sock.fileno():
                    self._reap(fd)
                    continue
                data, fds, _, _ = socket.recv_fds(self._sock, PACKET, len(Fds._fields), socket.MSG_CMSG_CLOEXEC)
                if not data:
                    return None
                request = json.loads(data)
                if request["t"] == "warm":
                    self._tell({"t": "ready", **warm(request)})
                    die_with_parent(self._agent, signal.SIGTERM)
                    self._warm = True
                elif self._start(request["id"], fds):
                    return Fds(*fds)

    def _start(self, number: int, fds: list[int]) -> bool:
        """True in the new worker."""
        spare = self._spare
        if spare is not None and spare.become(fds):
            self._spare, pid, pidfd = None, spare.pid, spare.pidfd
        else:
            pid = os.fork()
            if pid == 0:
                self._forget()
                return True
            pidfd = os.pidfd_open(pid)
            self._poll.register(pidfd, select.POLLIN)
        self._workers[pidfd] = pid
        for fd in fds:
            os.close(fd)
        self._tell({"t": "born", "id": number, "pid": pid}, pidfd)
        return False

    def _breed(self) -> list[int] | None:
        """Fork a spare; returns the file descriptors in it when it is to become a worker, ``None`` in the server."""
        spare = Spare.fork(self._forget)
        if isinstance(spare, list):
            return spare
        self._spare = spare
        self._poll.register(spare.pidfd, select.POLLIN)
        return None

    def _forget(self) -> None:
        """In a new process: close what belongs to the server."""
        self._sock.close()
        if self._spare is not None:
            self._spare.close()
        for pidfd in self._workers:
            os.close(pidfd)
        self._spare = None
        self._workers.clear()

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        if self._spare is not None and pidfd == self._spare.pidfd:
            spare, self._spare = self._spare, None
            spare.close()
            os.waitpid(spare.pid, 0)
            return
        pid = self._workers.pop(pidfd)
        os.close(pidfd)
        self._remains.note(pid)
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._tell({"t": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})
        self._remains.clear()

    def _tell(self, message: Mapping[str, object], *fds: int) -> None:
        """Send one packet; an agent that is gone is noticed when the next request is awaited."""
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [json.dumps(message).encode()], fds)

    def close(self) -> None:
        """Kill every worker and what it started, and the spare."""
        if self._spare is not None:
            self._spare.close()
        for pid in self._workers.values():
            self._remains.note(pid)
            kill_group(pid)
        self._remains.clear(seconds=_LAST)


def kill_group(pid: int) -> None:
    """Kill a process that is not reaped yet, and all members of the group that it leads."""
    for kill in (os.kill, os.killpg):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def warm(request: Mapping[str, object]) -> Mapping[str, object]:
    """Import what workers will need (``name.*``: with all submodules), and say what stands against forking, if anything."""
    modules, path = _names(request["modules"]), _names(request["path"])
    sys.path[:0] = path
    missing = [told for module in modules for name in _expand(module) if (told := _import(name))]
    del sys.path[: len(path)]
    _prepare(request["plugins"])
    importlib.invalidate_caches()
    gc.collect()
    gc.freeze()
    return {"problem": _problem(), "missing": missing}


def _prepare(table: object) -> None:
    if table and isinstance(table, str):
        from instep.errors import InstepError
        from instep.plugins import prepared

        # The worker raises the same error again, where it can be seen.
        with contextlib.suppress(InstepError):
            prepared(table)


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _expand(module: str) -> Iterable[str]:
    package = module.removesuffix(".*")
    if package == module or _import(package):
        return [package]
    path = getattr(sys.modules[package], "__path__", [])
    return [m.name for m in pkgutil.walk_packages(path, package + ".", onerror=lambda _: None)]


def _import(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the worker that needs the module will raise it again, where it can be seen
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _problem() -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA, which does not survive a fork"
    names = threads(os.getpid())
    return f"preloaded modules started threads, which do not survive a fork: {', '.join(names[1:])}" if len(names) > 1 else None


def _quit(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(argv: list[str]) -> None:
    """Serve, or become a worker and run its script."""
    fd, agent = map(int, argv)
    die_with_parent(agent)
    if not sys.flags.safe_path:
        sys.path.pop(0)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=fd), agent)
    own, fds = os.getpid(), None
    code = 0
    try:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, _quit)
        fds = server.serve()
    except SystemExit as end:
        if os.getpid() != own:
            raise
        code = int(end.code or 0)
    finally:
        if os.getpid() == own:
            for signum in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)  # one that comes now must not cut what ends the workers
            server.close()
    if os.getpid() == own:
        # Nothing here is worth what imported modules do at an exit: torch's takes most of the second in which all must be gone.
        os._exit(code)
    if fds is not None:
        del server
        run(become(fds, parent=own))


if __name__ == "__main__":
    main(sys.argv[1:])
