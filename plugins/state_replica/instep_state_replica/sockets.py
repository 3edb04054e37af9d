"""The sockets of a process: one listener for its whole life, and transfers that another thread may cut."""

import socket
import threading
from contextlib import suppress

_BACKLOG = 1024


def listen(host: str) -> socket.socket:
    """A listener on a port of the system's choice, bound to ``host`` alone."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def dial(host: str, port: int) -> socket.socket:
    """A socket that begins to connect, without waiting."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.connect_ex(address)
    return sock


class Sockets:
    """The open sockets of the present transfer and its incarnation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._incarnation = -1

    def begin(self, incarnation: int) -> None:
        """Sockets added from now on belong to ``incarnation``."""
        with self._lock:
            self._incarnation = incarnation

    def add(self, sock: socket.socket) -> None:
        """Keep a socket until it is discarded."""
        with self._lock:
            self._open.add(sock)

    def discard(self, sock: socket.socket) -> None:
        """A socket is about to be closed."""
        with self._lock:
            self._open.discard(sock)

    def shut_older(self, incarnation: int) -> None:
        """Cut all sockets of incarnations before ``incarnation``; their owner closes them. Callable from any thread."""
        with self._lock:
            if self._incarnation < incarnation:
                for sock in self._open:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
