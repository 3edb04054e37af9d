"""Forks the processes of a test's world from one warm interpreter, so that importing torch is paid once.

The parent's half is ``Nursery``; ``python -m instep.testing.nursery FD MODULE ...`` is the other one. Requests are JSON over a socket pair,
file descriptors go with them. Children die with the nursery, and the nursery ends when its socket does.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection

from instep.errors import InstepError
from instep.model import Json

STARTUP = 120.0
"""Seconds that importing torch may take on a busy machine."""
TORCH = ("torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "numpy", "instep.torch.shared")
_PR_SET_PDEATHSIG = 1
_PACKET = 1 << 16


class Nursery:
    """A process that has imported ``preload`` and forks at request. Close it when the tests are over."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(STARTUP)
        command = [sys.executable, "-m", "instep.testing.nursery", str(theirs.fileno()), *preload]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        if self._sock.recv(_PACKET) != b"ready":
            raise InstepError(f"the process that forks test ranks ended with code {self._process.wait(5)}; what it printed says why")

    def fork(self, order: Mapping[str, Json], *, channel: int, stacks: int) -> int:
        """Fork a child that obeys ``instep.testing.peer``. ``order`` tells it who it is; returns its process id."""
        socket.send_fds(self._sock, [json.dumps({**order, "path": sys.path}).encode()], [channel, stacks])
        return int(self._sock.recv(_PACKET))

    def close(self) -> None:
        """End it, and every child."""
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _main(fd: int, preload: Sequence[str]) -> None:
    control = socket.socket(fileno=fd)
    for name in preload:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    from instep.testing import peer

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(b"ready")
    while True:
        with suppress(InterruptedError):
            data, fds, _, _ = socket.recv_fds(control, _PACKET, 2)
            if not data:
                os._exit(0)
            if (pid := os.fork()) == 0:
                _child(peer.serve, json.loads(data), control, fds)
            for received in fds:
                os.close(received)
            control.send(str(pid).encode())


def _child(serve: "object", order: Mapping[str, Json], control: socket.socket, fds: Sequence[int]) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        if parent != 1 and callable(serve):
            serve(order, Connection(fds[0]), fds[1])
            code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
