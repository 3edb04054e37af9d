"""The fork server: one warm, single-threaded process from which every birth of a rank is forked in milliseconds.

``python -m instep.agent.forkserver FD PID``, where FD is a SOCK_SEQPACKET socket to the agent, PID the agent. One JSON object a packet:
``warm`` {modules, path} -> ``ready`` {problem, missing}; ``spawn`` {id} with the file descriptors of ``task.Fds`` ->
``born`` {id, pid} with a pidfd; ``exited`` {pid, code} when a worker is dead and its process group is killed.
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
from instep.agent.task import Fds

PACKET = 1 << 16


class _Server:
    """Forks on request until the agent is gone. Once warm it gets a signal then, so that it can still kill what its workers started."""

    def __init__(self, sock: socket.socket, agent: int) -> None:
        self._sock, self._agent = sock, agent
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._workers: dict[int, int] = {}

    def serve(self) -> Fds | None:
        """Returns in a new worker with its file descriptors, and in the server with ``None`` when the agent is gone."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._workers:
                    self._reap(fd)
                    continue
                data, fds, _, _ = socket.recv_fds(self._sock, PACKET, len(Fds._fields), socket.MSG_CMSG_CLOEXEC)
                if not data:
                    return None
                request = json.loads(data)
                if request["t"] == "warm":
                    self._tell({"t": "ready", **warm(request)})
                    die_with_parent(self._agent, signal.SIGTERM)
                elif self._fork(request["id"], fds):
                    return Fds(*fds)

    def _fork(self, number: int, fds: list[int]) -> bool:
        pid = os.fork()
        if pid == 0:
            self._sock.close()
            for other in self._workers:
                os.close(other)
            self._workers.clear()
            return True
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        for fd in fds:
            os.close(fd)
        self._tell({"t": "born", "id": number, "pid": pid}, pidfd)
        return False

    def _reap(self, pidfd: int) -> None:
        pid = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._tell({"t": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: Mapping[str, object], *fds: int) -> None:
        """Send one packet; an agent that is gone is noticed when the next request is awaited."""
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [json.dumps(message).encode()], fds)

    def close(self) -> None:
        """Kill every worker and what it started."""
        for pid in self._workers.values():
            kill_group(pid)


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
    try:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, _quit)
        fds = server.serve()
    finally:
        if os.getpid() == own:
            server.close()
    if fds is not None:
        del server
        run(become(fds, parent=own))


if __name__ == "__main__":
    main(sys.argv[1:])
