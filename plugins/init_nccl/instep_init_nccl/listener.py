"""A socket and one thread: each connection says one message in NCCL's framing, is answered at most once, and ends. Imports no torch."""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from instep.errors import CommsError
from instep_init_nccl.bootstrap import LENGTH, OPENING

_HEAD = OPENING.size + LENGTH.size
_LONGEST = 4096
_PATIENCE = 10.0
"""Seconds that a connection may take to say what it wants."""
_MOST = 1024
"""Connections at a time; more are turned away, and NCCL tries again."""
_BACKLOG = 1024


@dataclass(frozen=True)
class Message:
    """What a connection said: the word and kind that it opened with, and its payload."""

    word: int
    kind: int
    payload: bytes


@dataclass
class _Caller:
    deadline: float
    data: bytes = b""
    heard: bool = False


class Listener:
    """Accepts on ``host``; ``port`` 0 takes a free one. Raises ``CommsError`` when the port cannot be had.

    ``heard`` runs in the thread of the listener for each message, and tells whether the connection waits for an answer; ``gone`` is
    told of each connection that has ended.
    """

    def __init__(
        self, host: str, port: int, *, heard: Callable[[Message, socket.socket], bool], gone: Callable[[socket.socket], None]
    ) -> None:
        self._socket = _listening(host, port)
        self.host, self.port = str(self._socket.getsockname()[0]), int(self._socket.getsockname()[1])
        self._heard, self._gone = heard, gone
        self._callers: dict[socket.socket, _Caller] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._socket, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="instep-nccl-root", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the thread, close every connection. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join(_PATIENCE)
        for sock in (*self._callers, self._socket, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(1.0 if self._callers else None):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._socket:
                    self._accept()
                elif sock is not self._woken:
                    self._read(sock, self._callers[sock])
            now = time.monotonic()
            for sock in [s for s, caller in self._callers.items() if not caller.heard and caller.deadline < now]:
                self._end(sock)

    def _accept(self) -> None:
        with suppress(OSError):  # it may be gone since it came
            connection, _ = self._socket.accept()
            if len(self._callers) >= _MOST:
                connection.close()
                return
            connection.setblocking(False)
            self._callers[connection] = _Caller(time.monotonic() + _PATIENCE)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket, caller: _Caller) -> None:
        try:
            part = connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.data += part
        message = _parsed(caller.data)
        if caller.heard or message is None:
            if not part or caller.heard or len(caller.data) > _LONGEST:
                self._end(connection)
        elif self._heard(message, connection):
            caller.heard, caller.data = True, b""
        else:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._callers[connection]
        self._gone(connection)
        connection.close()


def answer(connection: socket.socket, data: bytes) -> None:
    """Answer a connection that waits; from any thread. The listener ends it then."""
    with suppress(OSError):  # whoever asked is gone
        connection.send(data)
    hang_up(connection)


def hang_up(connection: socket.socket) -> None:
    """End a connection; from any thread. The descriptor is closed by the listener's own."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _parsed(data: bytes) -> Message | None:
    if len(data) < _HEAD:
        return None
    word, kind = OPENING.unpack_from(data)
    (size,) = LENGTH.unpack_from(data, OPENING.size)
    if not 0 <= size <= len(data) - _HEAD:
        return None
    return Message(word, kind, data[_HEAD : _HEAD + size])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise CommsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
