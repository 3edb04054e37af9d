"""One shard group in a transfer, as one of its replicas takes part: learns the schema, draws stripes, or serves both."""

import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.agreement import key
from instep.errors import InstepError
from instep.hooks import Recovery, SharedState
from instep_state_replica import wire
from instep_state_replica.reactor import Refused, Steps
from instep_state_replica.roster import Roster
from instep_state_replica.stripe import Stripe, cut

if TYPE_CHECKING:
    from instep_state_replica.buffers import Buffers

Talk = Callable[[socket.socket, int], Steps]
"""What a client does with a connection after the greeting, given the rank at its other end."""

_LENGTH = 8
_SCHEMA_LIMIT = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Bytes of one read or write; seconds that a connection may take to stand; whether stripes are digested."""

    chunk: int
    connect: float
    digest: bool


class Exchange:
    """The part of this rank for ``share``. ``call`` connects to a rank and runs the given steps, once the greeting is over."""

    def __init__(self, recovery: Recovery, share: SharedState, ranks: Roster, *, limits: Limits, call: Callable[[int, Talk], None]) -> None:
        self.share, self.key, self.ranks = share, key(share.name), ranks
        self._recovery, self._limits, self._call = recovery, limits, call
        self._schema = b""
        self._outgoing: Buffers | None = None
        self._incoming: Buffers | None = None
        self._told: set[int] = set()
        self._served: set[int] = set()

    @property
    def serving(self) -> bool:
        """Whether peers will ask this rank for something."""
        return self._telling or self._donating

    @property
    def awaited(self) -> list[int]:
        """Ranks that have not yet fetched from this one what they need."""
        told = set(self.ranks.learning) - self._told if self._telling else set()
        served = set(self.ranks.restoring) - self._served if self._donating else set()
        return sorted(told | served)

    def begin(self) -> None:
        """Get ready to serve, or call the primary."""
        if self.serving:
            # The agent loads this plugin too, and has no torch.
            from instep_state_replica.buffers import Buffers

            self._schema, tensors = self.share.describe()
            self._outgoing = Buffers(tensors, outgoing=True)
        if self._recovery.rank in self.ranks.learning:
            self._call(self.ranks.primary, self._learn)

    def finish(self) -> int:
        """Everything has arrived, of all shard groups: take it over, and align. Returns the number of bytes received."""
        if self._incoming is not None:
            self._incoming.store()
            self.share.accept()
        if self.share.layouts and self._schema:
            self.share.align(self._schema)
        return 0 if self._incoming is None else self._incoming.total

    def serve(self, sock: socket.socket, source: int, asked: wire.Request) -> Steps:
        """What a peer that proved to be ``source`` asks for."""
        if asked.kind == wire.SCHEMA:
            yield from wire.write(sock, wire.ACK + wire.sealed(len(self._schema).to_bytes(_LENGTH, "little")))
            yield from wire.write(sock, wire.sealed(self._schema))
            yield from self._acknowledged(sock)
            self._told.add(source)
            return
        buffers = self._held(self._outgoing)
        if asked.layout != buffers.layout or not 0 <= asked.start <= asked.end <= buffers.total:
            raise InstepError(
                f"rank {source} asked rank {self._recovery.rank} for bytes {asked.start} to {asked.end} of {buffers.total} of shard group "
                f"{self.share.name!r} in another layout; the donors do not hold equal state"
            )
        yield from wire.write(sock, wire.ACK)
        stripe = self._stripe(buffers, asked.start, asked.end)
        yield from stripe.send(sock)
        yield from wire.write(sock, stripe.digest())
        yield from self._acknowledged(sock)
        self._served.add(source)

    @property
    def _telling(self) -> bool:
        return self._recovery.rank == self.ranks.primary and bool(self.ranks.learning)

    @property
    def _donating(self) -> bool:
        return self._recovery.rank in self.ranks.donors

    def _learn(self, sock: socket.socket, rank: int) -> Steps:
        yield from self._ask(sock, rank, wire.Request(wire.SCHEMA, self.key))
        length = int.from_bytes((yield from wire.unsealed(sock, _LENGTH)), "little")
        if length > _SCHEMA_LIMIT:
            raise InstepError(f"rank {rank} announced a schema of {length} bytes, the limit is {_SCHEMA_LIMIT}")
        self._schema = yield from wire.unsealed(sock, length)
        yield from wire.write(sock, wire.ACK)
        recovery = self._recovery
        if recovery.rank in self.ranks.restoring:
            from instep_state_replica.buffers import Buffers

            staged = not (recovery.fresh or recovery.torn)
            self._incoming = Buffers(self.share.destination(self._schema, staged=staged), outgoing=False)
            for donor in self.ranks.donors:
                self._call(donor, self._draw)

    def _draw(self, sock: socket.socket, rank: int) -> Steps:
        buffers = self._held(self._incoming)
        start, end = cut(buffers.total, len(self.ranks.donors), self.ranks.donors.index(rank))
        yield from self._ask(sock, rank, wire.Request(wire.STRIPE, self.key, start, end, buffers.layout))
        stripe = self._stripe(buffers, start, end)
        yield from stripe.receive(sock)
        if (yield from wire.read(sock, wire.DIGEST)) != stripe.digest():
            raise InstepError(
                f"bytes {start} to {end} of shard group {self.share.name!r} from rank {rank} arrived damaged on rank "
                f"{self._recovery.rank} (digests differ); look for a bad network interface or memory on these two hosts"
            )
        yield from wire.write(sock, wire.ACK)

    def _ask(self, sock: socket.socket, rank: int, request: wire.Request) -> Generator[int, None, None]:
        yield from wire.write(sock, request.pack())
        answer = yield from wire.read(sock, len(wire.ACK))
        if answer == wire.NAK:
            raise InstepError(
                f"rank {rank} has no shard group {self.share.name!r}, which rank {self._recovery.rank} has; all its replicas "
                f"{list(self.share.replicas)} must build and protect the same objects"
            )
        if answer != wire.ACK:
            raise wire.Damaged

    def _acknowledged(self, sock: socket.socket) -> Generator[int, None, None]:
        if (yield from wire.read(sock, len(wire.ACK))) != wire.ACK:
            raise Refused("it did not acknowledge what it received")

    def _stripe(self, buffers: "Buffers", start: int, end: int) -> Stripe:
        half, limits = (lambda: self._recovery.point("mid_transfer")), self._limits
        return Stripe(buffers.views, start, end, chunk=limits.chunk, half=half, digest=limits.digest)

    @staticmethod
    def _held(buffers: "Buffers | None") -> "Buffers":
        if buffers is None:
            raise InstepError("a stripe was asked for before there was any")
        return buffers
