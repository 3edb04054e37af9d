"""The spare: a process that the fork server keeps ready, with a step rehearsed, so that a replacement need not wait for a fork."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from instep.agent.child import die_with_parent, name_process
from instep.agent.task import Fds

_NAME = "instep-spare"


class Spare:
    """The server's side. The process ends with the server, or when ``drop`` is called."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self._sock = sock

    @classmethod
    def fork(cls, forget: Callable[[], None]) -> Self | list[int]:
        """A new spare. Returns in the process itself once it is to become a worker, with its file descriptors.

        ``forget`` is called in the process first: it closes what belongs to the server.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            forget()
            return _wait(theirs, server)
        theirs.close()
        return cls(pid, ours)

    def become(self, fds: list[int]) -> bool:
        """Have it become a worker; false when it is not ready, or dead."""
        try:
            if not self._sock.recv(1, socket.MSG_DONTWAIT):
                return False
            socket.send_fds(self._sock, [b"!"], fds)
        except OSError:
            return False
        self._sock.close()
        return True

    def close(self) -> None:
        """Close what belongs to the server; a process that has not become a worker ends."""
        self._sock.close()
        os.close(self.pidfd)


def _wait(sock: socket.socket, server: int) -> list[int]:
    die_with_parent(server)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    name_process(_NAME)
    if "torch" in sys.modules:
        from instep.torch.rehearsal import rehearse

        rehearse()
    with sock, suppress(OSError):  # the server has closed its end, with our byte unread
        sock.send(b".")
        data, fds, _, _ = socket.recv_fds(sock, 1, len(Fds._fields), socket.MSG_CMSG_CLOEXEC)
        if data:
            return fds
    os._exit(0)
