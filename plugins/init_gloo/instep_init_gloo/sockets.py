"""Shutting down gloo's connections from outside: the only way to wake operations that wait for a silent peer. Imports no torch.

gloo has no abort, ``shutdown(2)`` on the established sockets makes its waiters fail within milliseconds. The listening socket must
be left alone: gloo ends the process when ``accept`` fails.
"""

import os
import socket
import stat
from collections.abc import Collection

Name = tuple[str, int]


def shut_down(own: Name, peers: Collection[Name]) -> int:
    """Shut down every TCP connection of this process that involves ``own`` or goes to one of ``peers``; tells how many.

    Each check is done on a duplicate of the descriptor, so a number that is closed and given out again meanwhile does no harm.
    """
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            copy = os.dup(int(entry))
        except OSError:
            continue  # closed since it was listed
        with socket.socket(fileno=copy) as connection:
            if _matches(connection, own, peers):
                count += _shut(connection)
    return count


def _matches(connection: socket.socket, own: Name, peers: Collection[Name]) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    try:
        return connection.getsockname()[:2] == own or connection.getpeername()[:2] in peers
    except OSError:
        return False  # no longer, or not yet, connected


def _shut(connection: socket.socket) -> int:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0  # the peer was faster
    return 1
