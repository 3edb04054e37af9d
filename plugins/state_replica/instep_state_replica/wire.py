"""What peers say to each other: a greeting in which both prove that they know the job's secret, then one request.

Greeting: hello (magic, incarnation, source, destination, nonce) → nonce and proof of the server → proof of the client. A proof is an
HMAC-SHA256 over all of it. Request: kind, key of the shard group, first and last byte, layout, and a digest of all that; answered with one
byte, yes or no. Whatever decides how many bytes follow is digested by itself. Numbers are little-endian.
"""

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Generator
from dataclasses import dataclass

import xxhash

from instep_state_replica.reactor import READ, WRITE, Refused

_MAGIC = b"instep/1"
_HELLO = struct.Struct("<8sqII16s")
_REQUEST = struct.Struct("<BQQQQ")
_NONCE, _PROOF = 16, 32
DIGEST = 8
_PIECE = 1 << 20
ACK, NAK = b"\x06", b"\x15"
SCHEMA, STRIPE = 0, 1


class Damaged(Refused):
    """What arrived is not what was sent."""

    def __init__(self) -> None:
        super().__init__("what arrived is damaged (digests differ); look for a bad network interface or memory on these two hosts")


@dataclass(frozen=True)
class Request:
    """Kind ``SCHEMA``, or ``STRIPE`` with its range of bytes and the digest of the tensors' types and shapes; ``key``: of which group."""

    kind: int
    key: int
    start: int = 0
    end: int = 0
    layout: int = 0

    def pack(self) -> bytes:
        """The bytes to send."""
        return sealed(_REQUEST.pack(self.kind, self.key, self.start, self.end, self.layout))


@dataclass(frozen=True)
class Greeting:
    """Who talks to whom: the incarnation, the ranks of client and server, and the job's secret."""

    secret: bytes
    incarnation: int
    source: int
    destination: int

    def hello(self, nonce: bytes) -> bytes:
        """The client's first words."""
        return _HELLO.pack(_MAGIC, self.incarnation, self.source, self.destination, nonce)

    def proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        """What only a holder of the secret can say."""
        return hmac.digest(self.secret, role + hello + nonce, hashlib.sha256)


def read(sock: socket.socket, size: int) -> Generator[int, None, bytes]:
    """Exactly ``size`` bytes. Raises ``ConnectionError`` when the stream ends before."""
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(size - len(data), _PIECE))
        except BlockingIOError:
            yield READ
            continue
        if not part:
            raise ConnectionError("the connection was closed by the other side")
        data += part
    return bytes(data)


def write(sock: socket.socket, data: bytes) -> Generator[int, None, None]:
    """All of ``data``."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest[:_PIECE]) :]
        except BlockingIOError:
            yield WRITE


def connected(sock: socket.socket) -> Generator[int, None, None]:
    """Wait until a connection stands. Raises ``OSError`` when it does not come about."""
    yield WRITE
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, "cannot connect")


def greet(sock: socket.socket, greeting: Greeting) -> Generator[int, None, None]:
    """Client: prove itself, and that the server is the right one. Raises ``Refused`` when it is not."""
    hello = greeting.hello(secrets.token_bytes(_NONCE))
    yield from write(sock, hello)
    nonce = yield from read(sock, _NONCE)
    proof = yield from read(sock, _PROOF)
    if not hmac.compare_digest(proof, greeting.proof(b"server", hello, nonce)):
        raise Refused("it does not know the secret of this job")
    yield from write(sock, greeting.proof(b"client", hello, nonce))


def answer(sock: socket.socket, *, secret: bytes, incarnation: int, rank: int) -> Generator[int, None, int]:
    """Server: the rank of a client that proved itself. Raises ``Refused`` for any other."""
    hello = yield from read(sock, _HELLO.size)
    magic, theirs, source, destination, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or destination != rank:
        raise Refused("it asks for something else")
    if theirs != incarnation:
        raise Refused(f"it belongs to incarnation {theirs}, not {incarnation}")
    greeting = Greeting(secret, incarnation, source, destination)
    nonce = secrets.token_bytes(_NONCE)
    yield from write(sock, nonce + greeting.proof(b"server", hello, nonce))
    proof = yield from read(sock, _PROOF)
    if not hmac.compare_digest(proof, greeting.proof(b"client", hello, nonce)):
        raise Refused("it does not know the secret of this job")
    return int(source)


def request(sock: socket.socket) -> Generator[int, None, Request]:
    """Server: what the client wants. Raises ``Damaged``."""
    data = yield from unsealed(sock, _REQUEST.size)
    return Request(*_REQUEST.unpack(data))


def sealed(data: bytes) -> bytes:
    """The bytes, and a digest of them."""
    return data + xxhash.xxh3_64_digest(data)


def unsealed(sock: socket.socket, size: int) -> Generator[int, None, bytes]:
    """``size`` bytes that were sealed. Raises ``Damaged`` when their digest does not fit."""
    data = yield from read(sock, size)
    if (yield from read(sock, DIGEST)) != xxhash.xxh3_64_digest(data):
        raise Damaged
    return data
