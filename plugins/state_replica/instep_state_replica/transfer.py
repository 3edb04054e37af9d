"""One transfer: all shard groups of this rank in one loop; schemas from each group's primary, stripes from all its donors at once."""

import socket
import time
from collections.abc import Sequence
from contextlib import closing

from instep.errors import InstepError
from instep.hooks import Recovery, SharedState
from instep_state_replica import wire
from instep_state_replica.batch import batch
from instep_state_replica.exchange import Exchange, Limits, Talk
from instep_state_replica.reactor import Loop, Steps, Task
from instep_state_replica.roster import roster
from instep_state_replica.sockets import Sockets, dial

PORT = "peer"


class Transfer:
    """The part of one rank in one transfer of ``shares``: its shard groups, and those of which it sends a copy."""

    def __init__(
        self, recovery: Recovery, shares: Sequence[SharedState], *, listener: socket.socket, sockets: Sockets, limits: Limits
    ) -> None:
        self._recovery, self._limits, self._listener = recovery, limits, listener
        made = [Exchange(recovery, s, roster(recovery.plan, s), limits=limits, call=self._call) for s in shares]
        self._exchanges = {exchange.key: exchange for exchange in made}
        if len(self._exchanges) < len(made):
            raise InstepError(f"two shard groups of rank {recovery.rank} have one name: {sorted(e.share.name for e in made)}")
        self._loop = Loop(recovery.check, recovery.deadline, sockets)
        self._running = 0
        sockets.begin(recovery.plan.incarnation)

    def run(self) -> int:
        """Do it, and take over what arrived once all of it is here. Returns the number of bytes received.

        Raises:
            InstepError: a peer was lost or sent other bytes than it meant to, or has other shard groups, or the deadline passed.
        """
        exchanges = self._exchanges.values()
        with closing(self._loop):
            for exchange in exchanges:
                exchange.begin()
            if any(exchange.serving for exchange in exchanges):
                self._loop.listen(self._listener, self._serve)
            with batch():
                self._loop.run(self._finished, self._what)
        return sum(exchange.finish() for exchange in exchanges)

    def _finished(self) -> bool:
        return not self._running and not any(exchange.awaited for exchange in self._exchanges.values())

    def _what(self) -> str:
        awaited = [f"ranks {e.awaited} to fetch shard group {e.share.name!r}" for e in self._exchanges.values() if e.awaited]
        return f"restore_state on rank {self._recovery.rank}" + (f" ({'; '.join(awaited)})" if awaited else "")

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

    def _serve(self, task: Task) -> Steps:
        recovery, sock = self._recovery, task.sock
        source = yield from wire.answer(sock, secret=recovery.secret, incarnation=recovery.plan.incarnation, rank=recovery.rank)
        task.trust(f"rank {source}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = yield from wire.request(sock)
        exchange = self._exchanges.get(asked.key)
        if exchange is None or not exchange.serving:
            yield from wire.write(sock, wire.NAK)
            names = sorted(e.share.name for e in self._exchanges.values())
            raise InstepError(
                f"rank {source} asked rank {recovery.rank} for a shard group that it has not; it has {names}. All replicas of a group "
                "must build and protect the same objects"
            )
        yield from exchange.serve(sock, source, asked)
