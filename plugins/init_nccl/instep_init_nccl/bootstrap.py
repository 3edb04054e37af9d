"""The messages with which NCCL's ranks find their neighbours: what a rank tells its root, and what the root answers. Imports no torch.

Each connection begins with u64 magic and i32 type; a message is i32 size and payload. A rank tells i32 rank, number of ranks, index of the
root, number of roots (and an offset, since NCCL 2.29), 28 bytes of the address where it waits for the answer, and 128 bytes of
what its neighbour needs. The answer is the 128 bytes of the next rank (bootstrap.cc, socket.cc).
"""

import socket
import struct
from dataclasses import dataclass

from instep_init_nccl.ids import ADDRESS, UniqueId, decode_address, encode_address

OPENING = struct.Struct("<Qi")
LENGTH = struct.Struct("<i")
TYPE = 1
INFO = 128
"""Bytes of the connect information, NCCL_NET_HANDLE_MAXSIZE."""
HEADS = (16, 20)
"""Bytes before the addresses: four numbers before NCCL 2.29, five since."""
SIZES = tuple(head + ADDRESS + INFO for head in HEADS)


@dataclass(frozen=True)
class Hello:
    """What a rank tells a root. ``address`` is where it waits for the answer, ``info`` what the rank before it needs."""

    rank: int
    ranks: int
    root: int
    roots: int
    address: tuple[str, int]
    info: bytes

    @classmethod
    def decode(cls, payload: bytes) -> "Hello":
        """Read a payload of one of ``SIZES``. Raises ``InstepError`` for an address of an unknown family."""
        head = len(payload) - ADDRESS - INFO
        rank, ranks, root, roots = struct.unpack_from("<4i", payload)
        return cls(rank, ranks, root, roots, decode_address(payload[head : head + ADDRESS]), payload[head + ADDRESS :])

    def encode(self, head: int) -> bytes:
        """The payload, with ``head`` bytes before the addresses (one of ``HEADS``)."""
        numbers = struct.pack("<5i", self.rank, self.ranks, self.root, self.roots, 0)[:head]
        return numbers + encode_address(*self.address) + self.info.ljust(INFO, b"\0")


def root_of(rank: int, ranks: int, roots: int) -> int:
    """The root that a rank belongs to: the first ``ranks % roots`` roots own one rank more than the others."""
    each, more = divmod(ranks, roots)
    first = more * (each + 1)
    return rank // (each + 1) if rank < first else (rank - first) // each + more


def first_of(root: int, ranks: int, roots: int) -> int:
    """The first rank of a root."""
    each, more = divmod(ranks, roots)
    return root * each + min(root, more)


def opening(magic: int, payload: bytes, *, length: int | None = None) -> bytes:
    """The bytes of a connection with one message; ``length`` is what it claims to be, by default the truth."""
    return OPENING.pack(magic, TYPE) + LENGTH.pack(len(payload) if length is None else length) + payload


def send(address: tuple[str, int], data: bytes, *, seconds: float) -> None:
    """Connect, send and close. Raises ``OSError``, within ``seconds``."""
    with socket.create_connection(address, seconds) as connection:
        connection.sendall(data)


def retire(root: UniqueId, *, head: int, seconds: float = 2.0) -> bool:
    """End a real root thread that nobody will use: a rank that is out of range makes it leave. False when it was gone already.

    ``ncclGetUniqueId`` leaves one thread and one socket behind for each id until all its ranks have come.
    """
    hello = Hello(rank=-1, ranks=2, root=0, roots=1, address=(root.host, root.port), info=b"")
    try:
        send((root.host, root.port), opening(root.magic, hello.encode(head)), seconds=seconds)
    except OSError:
        return False
    return True
