"""``ncclUniqueId``, computed instead of asked for: where a rank's root listens, and a magic that fences an incarnation. Imports no torch.

Layout of the 128 bytes (little-endian): u64 magic, 28 bytes of socket address (u16 family, u16 port in network order, address), i32
number of ranks (NCCL 2.29 and later; 0 for a plain start), zeros.
"""

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass

from instep.errors import InstepError

SIZE = 128
ADDRESS = 28
ENV_MAGIC = 0x0280028002800280
"""The magic of every id that NCCL itself derives from ``NCCL_COMM_ID``."""
_MAGIC = struct.Struct("<Q")
_BITS = 48


@dataclass(frozen=True)
class UniqueId:
    """One root of a communicator: whoever knows the magic finds it at ``host:port``."""

    magic: int
    host: str
    port: int

    def encode(self) -> bytes:
        """The 128 bytes that NCCL calls a unique id."""
        return (_MAGIC.pack(self.magic) + encode_address(self.host, self.port)).ljust(SIZE, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> "UniqueId":
        """Read what ``ncclGetUniqueId`` wrote. Raises ``InstepError`` for anything else."""
        if len(raw) != SIZE:
            raise InstepError(f"an NCCL unique id has {SIZE} bytes, not {len(raw)}")
        host, port = decode_address(raw[8 : 8 + ADDRESS])
        return cls(_MAGIC.unpack_from(raw)[0], host, port)


def encode_address(host: str, port: int) -> bytes:
    """NCCL's socket address: ``sockaddr_in`` or ``sockaddr_in6`` in 28 bytes. ``host`` is a numeric address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return (struct.pack("<H", family) + struct.pack(">H", port) + flow + socket.inet_pton(family, host)).ljust(ADDRESS, b"\0")


def decode_address(raw: bytes) -> tuple[str, int]:
    """Host and port of such an address. Raises ``InstepError`` for another family."""
    (family,) = struct.unpack_from("<H", raw)
    (port,) = struct.unpack_from(">H", raw, 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8]), int(port)
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, raw[8:24]), int(port)
    raise InstepError(f"an NCCL socket address of family {family}: neither IPv4 nor IPv6")


def magic_of(secret: bytes, incarnation: int, group: str, communicator: str) -> int:
    """The magic of one communicator: 16 bits of incarnation above 48 bits that only ranks of this job can compute.

    So a root knows a straggler of an older incarnation from its first eight bytes, and nobody else can guess its way in.
    """
    digest = hmac.new(secret, f"{incarnation}\0{group}\0{communicator}".encode(), hashlib.sha256).digest()
    return (incarnation & 0xFFFF) << _BITS | int.from_bytes(digest[: _BITS // 8], "little")


def is_older(magic: int, incarnation: int) -> bool:
    """Whether a magic belongs to an incarnation before this one. Incarnations are compared within a window of 32768."""
    return 0 < ((incarnation - (magic >> _BITS)) & 0xFFFF) < 0x8000
