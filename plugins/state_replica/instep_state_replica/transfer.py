"""One transfer: every rank learns the schema from the primary donor, restoring ranks draw stripes from all donors at once."""

import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import InstepError
from instep.hooks import Recovery
from instep.model import Plan, Role
from instep_state_replica import wire
from instep_state_replica.reactor import Loop, Refused, Steps, Task
from instep_state_replica.sockets import Sockets, dial
from instep_state_replica.stripe import Stripe, cut

if TYPE_CHECKING:
    from torch import Tensor

    from instep_state_replica.buffers import Buffers

Talk = Callable[[socket.socket, int], Steps]
"""What a client does with a connection after the greeting, given the rank at its other end."""

PORT = "peer"
_LENGTH = 8
_DIGEST = 8
_SCHEMA_LIMIT = 1 << 30


@dataclass(frozen=True)
class Roster:
    """Who does what: ``primary`` tells the schema, ``donors`` send to ``restoring``; both ascending."""

    primary: int
    donors: tuple[int, ...]
    restoring: tuple[int, ...]


def roster(plan: Plan) -> Roster | None:
    """The roster of a plan for replicated state; ``None`` when no rank holds all that is missing."""
    restoring = tuple(rank for rank, role in enumerate(plan.roles) if role is Role.RESTORE)
    able = {rank for rank, role in enumerate(plan.roles) if role is not Role.RESTORE}
    for ranks in plan.donors.values():
        able &= set(ranks) if ranks else able
    return Roster(min(able), tuple(sorted(able)), restoring) if able else None


@dataclass(frozen=True)
class Limits:
    """Bytes of one read or write; seconds that a connection may take to stand."""

    chunk: int
    connect: float


class Transfer:
    """The part of one rank in one transfer."""

    def __init__(self, recovery: Recovery, ranks: Roster, *, listener: socket.socket, sockets: Sockets, limits: Limits) -> None:
        self._recovery, self._ranks, self._limits = recovery, ranks, limits
        self._listener = listener
        self._loop = Loop(recovery.check, recovery.deadline, sockets)
        self._schema = b""
        self._outgoing: Buffers | None = None
        self._incoming: Buffers | None = None
        self._told: set[int] = set()
        self._served: set[int] = set()
        self._running = 0
        sockets.begin(recovery.plan.incarnation)

    def run(self) -> int:
        """Do it, and take over what arrived. Returns the number of bytes received.

        Raises:
            InstepError: a peer was lost or sent other bytes than it meant to, or the deadline passed.
        """
        recovery, ranks = self._recovery, self._ranks
        with closing(self._loop):
            if self._telling or self._donating:
                self._schema, tensors = recovery.state.describe()
                self._outgoing = self._buffers(tensors, outgoing=True)
                self._loop.listen(self._listener, self._serve)
            if recovery.rank != ranks.primary:
                self._call(ranks.primary, self._learn)
            self._loop.run(self._finished, f"restore_state on rank {recovery.rank}")
        if self._incoming is not None:
            self._incoming.store()
            recovery.state.accept()
        recovery.state.align(self._schema)
        return 0 if self._incoming is None else self._incoming.total

    @property
    def _telling(self) -> bool:
        return self._recovery.rank == self._ranks.primary and len(self._recovery.plan.roles) > 1

    @property
    def _donating(self) -> bool:
        return self._recovery.rank in self._ranks.donors and bool(self._ranks.restoring)

    def _finished(self) -> bool:
        told = not self._telling or len(self._told) == len(self._recovery.plan.roles) - 1
        served = not self._donating or self._served == set(self._ranks.restoring)
        return told and served and not self._running

    def _call(self, rank: int, steps: Talk) -> None:
        address = next(a for a in self._recovery.plan.book.addresses if a.rank == rank)
        if PORT not in address.ports:
            raise InstepError(f"rank {rank} announced no port {PORT!r}; state_replica must be enabled on every rank")
        sock = dial(address.host, address.ports[PORT])
        task = Task(sock, peer=f"rank {rank}", trusted=True, expires=time.monotonic() + self._limits.connect)
        self._running += 1
        self._loop.add(task, self._client(task, rank, steps))

    def _client(self, task: Task, rank: int, steps: Talk) -> Steps:
        recovery = self._recovery
        yield from wire.connected(task.sock)
        task.expires = None
        yield from wire.greet(task.sock, wire.Greeting(recovery.secret, recovery.plan.incarnation, recovery.rank, rank))
        yield from steps(task.sock, rank)
        self._running -= 1

    def _learn(self, sock: socket.socket, rank: int) -> Steps:
        yield from wire.write(sock, wire.Request(wire.SCHEMA).pack())
        length = int.from_bytes((yield from wire.read(sock, _LENGTH)), "little")
        if length > _SCHEMA_LIMIT:
            raise InstepError(f"rank {rank} announced a schema of {length} bytes, the limit is {_SCHEMA_LIMIT}")
        self._schema = yield from wire.read(sock, length)
        yield from wire.write(sock, wire.ACK)
        recovery = self._recovery
        if recovery.rank in self._ranks.restoring:
            staged = not (recovery.fresh or recovery.torn)
            self._incoming = self._buffers(recovery.state.destination(self._schema, staged=staged), outgoing=False)
            for donor in self._ranks.donors:
                self._call(donor, self._draw)

    def _draw(self, sock: socket.socket, rank: int) -> Steps:
        buffers = self._held(self._incoming)
        start, end = cut(buffers.total, len(self._ranks.donors), self._ranks.donors.index(rank))
        yield from wire.write(sock, wire.Request(wire.STRIPE, start, end, buffers.layout).pack())
        stripe = self._stripe(buffers, start, end)
        yield from stripe.receive(sock)
        if (yield from wire.read(sock, _DIGEST)) != stripe.digest():
            raise InstepError(
                f"bytes {start} to {end} of the state from rank {rank} arrived damaged on rank {self._recovery.rank} (digests differ); "
                "look for a bad network interface or memory on these two hosts"
            )
        yield from wire.write(sock, wire.ACK)

    def _serve(self, task: Task) -> Steps:
        recovery, sock = self._recovery, task.sock
        source = yield from wire.answer(sock, secret=recovery.secret, incarnation=recovery.plan.incarnation, rank=recovery.rank)
        task.trust(f"rank {source}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = yield from wire.request(sock)
        if asked.kind == wire.SCHEMA:
            yield from wire.write(sock, len(self._schema).to_bytes(_LENGTH, "little"))
            yield from wire.write(sock, self._schema)
            yield from self._acknowledged(sock)
            self._told.add(source)
            return
        buffers = self._held(self._outgoing)
        if asked.layout != buffers.layout or not 0 <= asked.start <= asked.end <= buffers.total:
            raise InstepError(
                f"rank {source} asked rank {recovery.rank} for bytes {asked.start} to {asked.end} of {buffers.total} in another layout; "
                "the donors do not hold equal state"
            )
        stripe = self._stripe(buffers, asked.start, asked.end)
        yield from stripe.send(sock)
        yield from wire.write(sock, stripe.digest())
        yield from self._acknowledged(sock)
        self._served.add(source)

    def _acknowledged(self, sock: socket.socket) -> Generator[int, None, None]:
        if (yield from wire.read(sock, len(wire.ACK))) != wire.ACK:
            raise Refused("it did not acknowledge what it received")

    def _stripe(self, buffers: "Buffers", start: int, end: int) -> Stripe:
        return Stripe(buffers.views, start, end, chunk=self._limits.chunk, half=lambda: self._recovery.point("mid_transfer"))

    @staticmethod
    def _buffers(tensors: "Sequence[Tensor]", *, outgoing: bool) -> "Buffers":
        # The agent loads this plugin too, and has no torch.
        from instep_state_replica.buffers import Buffers

        return Buffers(tensors, outgoing=outgoing)

    @staticmethod
    def _held(buffers: "Buffers | None") -> "Buffers":
        if buffers is None:
            raise InstepError("a stripe was asked for before there was any")
        return buffers
