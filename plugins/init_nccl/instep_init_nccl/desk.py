"""The desk: what one rank tells its peers under a name, for ids that cannot be computed. No server stands between them.

A request is JSON with a keyed digest before it, so that only ranks of the job are answered; it waits until the value is there, or until
its incarnation is over. Imports no torch.
"""

import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable

from instep.errors import CommsError
from instep_init_nccl.bootstrap import LENGTH, OPENING

MAGIC = int.from_bytes(b"instepid", "little")
TYPE = 2
_DIGEST = hashlib.sha256().digest_size
_SLICE = 0.1
_PAUSE = 0.02


class Desk:
    """Values by name, for one incarnation, and the names asked for by connections that wait. Not for several threads at once."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._incarnation = 0
        self._values: dict[tuple[int, str], bytes] = {}
        self._waiting: dict[tuple[int, str], list[socket.socket]] = {}

    def put(self, incarnation: int, name: str, value: bytes) -> list[tuple[socket.socket, bytes]]:
        """Tell a value: connections to be answered, with the bytes for them."""
        self._values[incarnation, name] = value
        return [(connection, _framed(value)) for connection in self._waiting.pop((incarnation, name), [])]

    def ask(self, payload: bytes, connection: socket.socket) -> bytes | None:
        """A request: the bytes of its answer, or ``None`` when it has to wait. Raises ``CommsError`` for one that gets none."""
        name = self._name(payload)
        if name[0] < self._incarnation:
            raise CommsError(f"a request of incarnation {name[0]} in incarnation {self._incarnation}")
        if name in self._values:
            return _framed(self._values[name])
        self._waiting.setdefault(name, []).append(connection)
        return None

    def forget(self, connection: socket.socket) -> None:
        """Whoever asked is gone."""
        for waiting in self._waiting.values():
            if connection in waiting:
                waiting.remove(connection)

    def advance(self, incarnation: int) -> list[socket.socket]:
        """Forget what is older: connections that will get no answer."""
        self._incarnation = incarnation
        self._values = {name: value for name, value in self._values.items() if name[0] >= incarnation}
        over = [name for name in self._waiting if name[0] < incarnation]
        return [connection for name in over for connection in self._waiting.pop(name)]

    def _name(self, payload: bytes) -> tuple[int, str]:
        digest, body = payload[:_DIGEST], payload[_DIGEST:]
        if not hmac.compare_digest(digest, hmac.digest(self._secret, body, "sha256")):
            raise CommsError("a request without the secret of the job")
        asked = json.loads(body)
        return int(asked["incarnation"]), str(asked["name"])


def request(secret: bytes, incarnation: int, name: str) -> bytes:
    """The bytes of a request."""
    body = json.dumps({"incarnation": incarnation, "name": name}).encode()
    payload = hmac.digest(secret, body, "sha256") + body
    return OPENING.pack(MAGIC, TYPE) + LENGTH.pack(len(payload)) + payload


def fetch(address: tuple[str, int], data: bytes, *, deadline: float, check: Callable[[], None]) -> bytes:
    """Ask a peer's desk and wait for the value. ``check`` may raise; ``deadline`` is a monotonic time.

    A refused connection is tried again, since the peer may not listen yet. Raises ``CommsError`` when there is no answer in time.
    """
    while True:
        check()
        try:
            with socket.create_connection(address, 1.0) as connection:
                connection.sendall(data)
                connection.settimeout(_SLICE)
                size = struct.unpack("<i", _exactly(connection, LENGTH.size, deadline, check))[0]
                return _exactly(connection, size, deadline, check)
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommsError(f"no answer from {address[0]}:{address[1]} ({error})") from None
            time.sleep(_PAUSE)


def _exactly(connection: socket.socket, count: int, deadline: float, check: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < count:
        check()
        try:
            part = connection.recv(count - len(data))
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


def _framed(value: bytes) -> bytes:
    return LENGTH.pack(len(value)) + value
