"""How a copy travels to a buddy: an offer (what it is, the digest of each part), the parts that are wanted, the parts, a yes or no.

After the greeting that all sockets of this plugin begin with (``wire``) the sockets block: one system call moves a whole part, and no
other thread of the process notices. Everything that is not ready in time, or was cut by ``quiesce``, is an ``OSError``.
"""

import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from instep import codec
from instep.errors import InstepError
from instep_state_replica.copies import Copy
from instep_state_replica.reactor import READ, WRITE, Steps

_LENGTH = struct.Struct("<Q")
_DIGEST = 8
_LIMIT = 1 << 30
_SLICE = 0.05
_PATIENCE = 60
"""Seconds that a peer may keep a byte back before its connection counts as lost."""


@dataclass(frozen=True)
class Offer:
    """A copy without its bytes. ``specs``: types and shapes, packed; ``digests``: one a part."""

    name: str
    step: int
    replicas: tuple[int, ...]
    layouts: bool
    schema: bytes
    order: tuple[int, ...]
    specs: bytes
    digests: tuple[int, ...]

    @staticmethod
    def of(copy: Copy) -> "Offer":
        """The offer of a copy."""
        told, order = copy.schema()
        return Offer(copy.name, copy.step, copy.replicas, copy.layouts, told, order, copy.arrangement.packed, tuple(copy.digests))

    def pack(self) -> bytes:
        """The bytes to send: length, content, digest."""
        data = codec.encode([self.name, self.step, self.replicas, self.layouts, self.schema, self.order, self.specs, self.digests])
        return _LENGTH.pack(len(data)) + data + xxhash.xxh3_64_digest(data)


def read_offer(sock: socket.socket) -> Offer:
    """Receive an offer. Raises ``InstepError`` when it is damaged."""
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if size > _LIMIT:
        raise InstepError(f"a buddy offers a copy with a description of {size} bytes")
    data = _exactly(sock, size)
    if _exactly(sock, _DIGEST) != xxhash.xxh3_64_digest(data):
        raise InstepError("the offer of a copy arrived damaged (digests differ)")
    match codec.decode(data):
        case [str(name), int(step), tuple(replicas), bool(layouts), bytes(schema), tuple(order), bytes(specs), tuple(digests)]:
            return Offer(name, step, replicas, layouts, schema, order, specs, digests)
    raise InstepError("the offer of a copy is damaged")


def greeted(sock: socket.socket, steps: Steps, *, until: float, go_on: Callable[[], object]) -> None:
    """Run the steps of a greeting; ``until`` is a monotonic time in seconds, ``go_on`` may raise. Then the socket blocks."""
    sock.setblocking(False)
    poll = select.poll()
    for ready in steps:
        poll.register(sock, (select.POLLIN if ready & READ else 0) | (select.POLLOUT if ready & WRITE else 0))
        while not poll.poll(1e3 * _SLICE):
            go_on()
            if time.monotonic() > until:
                raise TimeoutError("no answer in time")
    sock.setblocking(True)
    patience = struct.pack("ll", _PATIENCE, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def awaited(sock: socket.socket) -> None:
    """Wait until something arrives, however long: the owner trains meanwhile."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()


def send(sock: socket.socket, *parts: "bytes | memoryview") -> None:
    """All bytes, in as few system calls as it takes."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[sock.send(rest) :]


def receive(sock: socket.socket, views: Iterable[memoryview]) -> None:
    """Fill these views."""
    for view in views:
        rest = view
        while rest:
            count = sock.recv_into(rest, len(rest), socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the connection was closed by the other side")
            rest = rest[count:]


def word(sock: socket.socket, size: int) -> bytes:
    """A short answer."""
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive(sock, [memoryview(data)])
    return bytes(data)
