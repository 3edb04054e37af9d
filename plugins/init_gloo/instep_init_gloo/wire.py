"""The address blob that gloo exchanges through a store: written for peers, read for the own rank. Imports no torch.

Layout (little-endian): u64 length and host text, u64 136, sockaddr_storage of 128 bytes (u16 family, u16 port in network order,
address), i64 -1, then one i64 pair number for each rank of the group: the number under which the sender expects that rank.
"""

import socket
import struct
from dataclasses import dataclass

from instep.errors import InstepError

_LENGTH = struct.Struct("<Q")
_SOCKADDR = 136
_HEAD = _LENGTH.pack(6) + b"instep" + _LENGTH.pack(_SOCKADDR)


@dataclass(frozen=True)
class Endpoint:
    """Where a gloo device listens, and the pair number it gives to the first rank of a group."""

    host: str
    port: int
    first: int


def encode(peer: Endpoint, reader: int) -> bytes:
    """The blob of ``peer`` as group rank ``reader`` needs it: gloo looks at the reader's own pair number only, and at none after it."""
    family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
    flow = bytes(4) if family == socket.AF_INET6 else b""
    address = struct.pack("<H", family) + struct.pack(">H", peer.port) + flow + socket.inet_pton(family, peer.host)
    return _HEAD + address.ljust(128, b"\0") + struct.pack("<q", -1) + bytes(8 * reader) + struct.pack("<q", peer.first + reader)


def decode(blob: bytes) -> Endpoint:
    """Read a blob that gloo wrote. Raises ``InstepError`` when it is not of the layout that pair numbers can be computed for."""
    at = _LENGTH.size + _LENGTH.unpack_from(blob)[0]
    (size,) = _LENGTH.unpack_from(blob, at)
    at += _LENGTH.size
    if size != _SOCKADDR or len(blob) < at + _SOCKADDR + 8:
        raise InstepError(
            "gloo writes its addresses without pair numbers; unset GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER and TORCH_GLOO_LAZY_INIT, "
            "init_gloo computes these numbers itself"
        )
    (family,) = struct.unpack_from("<H", blob, at)
    (port,) = struct.unpack_from(">H", blob, at + 2)
    host = socket.inet_ntop(family, blob[at + 4 : at + 8] if family == socket.AF_INET else blob[at + 8 : at + 24])
    (first,) = struct.unpack_from("<q", blob, at + _SOCKADDR)
    return Endpoint(host, port, first)
