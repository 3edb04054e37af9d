"""Scripted ranks: they say on real sockets what NCCL's bootstrap says, up to the answer with the next rank's address."""

import socket
import struct
import threading
from collections.abc import Sequence

from instep_init_nccl.bootstrap import INFO, LENGTH, OPENING, Hello, opening, root_of, send
from instep_init_nccl.ids import UniqueId

PATIENCE = 20.0


class ScriptedRank(threading.Thread):
    """One rank of a communicator. ``next`` is the rank whose address it was given, ``error`` what went wrong instead."""

    def __init__(self, rank: int, size: int, ids: Sequence[bytes], *, head: int, life: int = 0) -> None:
        super().__init__(daemon=True)
        self.rank, self.size, self.head = rank, size, head
        self.next: int | None = None
        self.life: int | None = None
        self.error: str | None = None
        self._roots = [UniqueId.decode(raw) for raw in ids]
        self._info = struct.pack("<2i", 7000 + rank, life)

    def run(self) -> None:
        try:
            self._join()
        except (OSError, AssertionError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def say(self, listening: tuple[str, int]) -> None:
        """The one or two hellos of this rank."""
        size, roots = self.size, len(self._roots)
        own = root_of(self.rank, size, roots)
        self._hello(self.rank, own, listening)
        before = (self.rank - 1) % size
        if roots > 1 and (self.rank == 0 or root_of(self.rank - 1, size, roots) != own):
            self._hello(before + 1, root_of(before, size, roots), listening)

    def _hello(self, rank: int, root: int, listening: tuple[str, int]) -> None:
        hello = Hello(rank, self.size, root, len(self._roots), listening, self._info)
        at = self._roots[root]
        send((at.host, at.port), opening(at.magic, hello.encode(self.head)), seconds=PATIENCE)

    def _join(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(PATIENCE)
            self.say(listening.getsockname())
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(PATIENCE)
                data = b""
                while part := connection.recv(4096):
                    data += part
        magic, kind = OPENING.unpack_from(data)
        (length,) = LENGTH.unpack_from(data, OPENING.size)
        own = self._roots[root_of(self.rank, self.size, len(self._roots))]
        assert (magic, kind) == (own.magic, 1), "an answer under another magic"
        assert length == INFO, f"a message of {length} bytes"
        number, self.life = struct.unpack_from("<2i", data, OPENING.size + LENGTH.size)
        self.next = number - 7000


def join_all(size: int, ids: Sequence[bytes], *, head: int, lives: Sequence[int] | None = None) -> list[ScriptedRank]:
    """All ranks of a communicator at once, until each has its answer."""
    ranks = [ScriptedRank(rank, size, ids, head=head, life=lives[rank] if lives else 0) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * PATIENCE)
    return ranks


def in_a_ring(ranks: Sequence[ScriptedRank]) -> bool:
    """Whether each was told of the next one."""
    assert [r.error for r in ranks if r.error] == []
    return all(r.next == (r.rank + 1) % r.size for r in ranks)
