"""A stripe: a contiguous range of the bytes of many buffers, moved without copies and digested as it passes."""

import socket
from collections.abc import Callable, Generator, Sequence

import xxhash

from instep_state_replica.pages import populate
from instep_state_replica.reactor import READ, WRITE

_BUFFERS = 256
"""Buffers in one system call; the system allows 1024."""
_SMALL = 1 << 16
"""Bytes under which a part is sent together with others."""
_TURN = 1 << 28
"""Bytes until other sockets get their turn: each turn of another donor begins with memory that no cache holds any more."""


def cut(total: int, parts: int, index: int) -> tuple[int, int]:
    """First byte, and the one after the last, of part ``index`` of ``parts`` nearly equal ones."""
    return total * index // parts, total * (index + 1) // parts


class Stripe:
    """Walks the bytes from ``start`` to ``end`` of ``buffers`` in chunks of at most ``chunk`` bytes.

    ``half`` is called once, when half of the bytes have passed; a chunk ends there.
    """

    def __init__(
        self, buffers: Sequence[memoryview], start: int, end: int, *, chunk: int, half: Callable[[], None], digest: bool = True
    ) -> None:
        self.size, self.done = end - start, 0
        self._parts = list(_within(buffers, start, end, most=chunk))
        self._index = self._offset = 0
        self._turn = _TURN
        self._mapped = -1
        self._chunk, self._half, self._middle = chunk, half, (end - start + 1) // 2
        self._digest, self._digesting = xxhash.xxh3_64(), digest

    def digest(self) -> bytes:
        """Eight bytes that depend on all that has passed, and its order; on nothing without ``digest``."""
        return self._digest.digest()

    def send(self, sock: socket.socket) -> Generator[int, None, None]:
        """Send all of it."""
        while self.done < self.size:
            chunk = self._next()
            try:
                count = sock.sendmsg(chunk) if isinstance(chunk, list) else sock.send(chunk)
            except BlockingIOError:
                yield WRITE
                continue
            self._advance(count)
            if self._pause():
                yield WRITE

    def receive(self, sock: socket.socket) -> Generator[int, None, None]:
        """Receive all of it in place."""
        while self.done < self.size:
            if self._index > self._mapped:
                self._mapped = self._index
                populate(self._parts[self._index])
            chunk = self._next()
            try:
                count = sock.recvmsg_into(chunk)[0] if isinstance(chunk, list) else sock.recv_into(chunk)
            except BlockingIOError:
                yield READ
                continue
            if not count:
                raise ConnectionError(f"the connection was closed by the other side after {self.done} of {self.size} bytes")
            self._advance(count)
            if self._pause():
                yield READ

    def _pause(self) -> bool:
        """Whether it is the others' turn: a socket that is always ready must not starve them."""
        if self.done < self._turn or self.done == self.size:
            return False
        self._turn = self.done + _TURN
        return True

    def _next(self) -> memoryview | list[memoryview]:
        """What is left of the present part; small parts together with those behind it."""
        left = (self._middle if self.done < self._middle else self.size) - self.done
        part = self._parts[self._index][self._offset : self._offset + left]
        if len(part) >= _SMALL:
            return part
        out, index = [part], self._index + 1
        left = min(left, self._chunk) - len(part)
        while left and len(out) < _BUFFERS:
            out.append(self._parts[index][:left])
            left -= len(out[-1])
            index += 1
        return out

    def _advance(self, count: int) -> None:
        before = self.done
        self.done += count
        while count:
            part = self._parts[self._index][self._offset : self._offset + count]
            if self._digesting:
                self._digest.update(part)
            count -= len(part)
            self._offset += len(part)
            if self._offset == len(self._parts[self._index]):
                self._index, self._offset = self._index + 1, 0
        if before < self._middle <= self.done:
            self._half()


def _within(buffers: Sequence[memoryview], start: int, end: int, *, most: int) -> Generator[memoryview, None, None]:
    at = 0
    for buffer in buffers:
        first, last = max(start - at, 0), min(end - at, len(buffer))
        for piece in range(first, last, most):
            yield buffer[piece : min(piece + most, last)]
        at += len(buffer)
