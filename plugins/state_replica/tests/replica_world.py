"""Worlds of real processes, each a rank with the plugin and shard groups of its own; the test plays the agent over pipes."""

import multiprocessing
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from replica_worker import SECONDS, Digests, Orders, Outcome, Spec, main

from instep.model import Address, Plan, Role, Status, Vote
from instep.plan import plan

_BIRTH = 60.0
"""Seconds that a new process may take to say where it listens: it imports torch, perhaps beside others that do."""


class World:
    """All ranks, seen from the test. ``groups``: replicas by name of each shard group; unless given there is one, of all ranks."""

    def __init__(self, size: int, *, groups: Mapping[str, tuple[int, ...]] | None = None, **settings: int) -> None:
        self.size = size
        self.groups = {"replica": tuple(range(size))} if groups is None else groups
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([main.__module__, "torch._dynamo"])
        self._settings = settings
        self.pipes: list[Connection] = []
        self._workers = [self._birth(rank) for rank in range(size)]
        self.ports = [self._receive(rank, _BIRTH)["peer"] for rank in range(size)]  # type: ignore[index]
        self._specs: dict[int, list[Spec]] = {}
        self.incarnation = 0

    def _birth(self, rank: int) -> "multiprocessing.process.BaseProcess":
        ours, theirs = self._context.Pipe()
        worker = self._context.Process(target=main, args=(rank, self.size, theirs, self._settings), daemon=True)
        worker.start()
        theirs.close()
        self.pipes.insert(rank, ours)
        return worker

    def replace(self, rank: int) -> None:
        """A new birth for a rank that was killed."""
        self._workers[rank].join(5)
        self.pipes.pop(rank).close()
        self._workers[rank] = self._birth(rank)
        self.ports[rank] = self._receive(rank, _BIRTH)["peer"]  # type: ignore[index]

    def _receive(self, rank: int, seconds: float = SECONDS + 10) -> object:
        if not self.pipes[rank].poll(seconds):
            raise TimeoutError(f"rank {rank} says nothing")
        return self.pipes[rank].recv()

    def specs(self, rank: int, *, width: int = 64, layouts: Collection[str] = ("replica",)) -> list[Spec]:
        """The shard groups of a rank."""
        return [Spec(name, ranks, layouts=name in layouts, width=width) for name, ranks in self.groups.items() if rank in ranks]

    def state(self, rank: int, steps: int, *, width: int = 64, specs: list[Spec] | None = None) -> Digests:
        """Give a rank the state after some steps; returns its digests."""
        self._specs[rank] = self.specs(rank, width=width) if specs is None else specs
        return self._tell(rank, ("state", self._specs[rank], steps))

    def tamper(self, rank: int, name: str = "replica") -> Digests:
        """Change one value of a shard group on one rank."""
        return self._tell(rank, ("tamper", name))

    def _tell(self, rank: int, command: object) -> Digests:
        self.pipes[rank].send(command)
        digests = self._receive(rank)
        assert isinstance(digests, tuple)
        return digests

    def plan(self, *restoring: int, ports: Mapping[int, int] | None = None) -> Plan:
        """Core's next plan, in which the ``restoring`` ranks draw from all others."""
        self.incarnation += 1
        actual = {**dict(enumerate(self.ports)), **(ports or {})}
        votes = [
            Vote(
                rank=rank, birth=0, incarnation=self.incarnation, block=0, step=7, groups=(),
                status=Status.FRESH if rank in restoring else Status.CLEAN,
                address=Address(rank=rank, birth=0, host="127.0.0.1", ports={"peer": actual[rank]}),
                shards={spec.name: spec.replicas for spec in self._specs[rank]},
            )
            for rank in range(self.size)
        ]  # fmt: skip
        made = plan(votes)
        assert isinstance(made, Plan)
        assert [rank for rank, role in enumerate(made.roles) if role is Role.RESTORE] == sorted(restoring)
        return made

    def recover(self, orders: Mapping[int, Orders], *, interrupt_after: float | None = None) -> dict[int, Outcome]:
        """Run a recovery on the given ranks; the outcome of each that lived to tell."""
        for rank, each in orders.items():
            self.pipes[rank].send(("recover", each))
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            for rank in orders:
                with suppress(OSError):
                    self.pipes[rank].send(("interrupt", self.incarnation + 1))
        out: dict[int, Outcome] = {}
        rows: dict[int, bytes] = {}
        waiting = set(orders)
        while waiting:
            for rank in sorted(waiting - rows.keys()):
                try:
                    said = self._receive(rank)
                except (EOFError, ConnectionError):
                    waiting.discard(rank)
                    continue
                if isinstance(said, Outcome):
                    out[rank] = said
                    waiting.discard(rank)
                elif isinstance(said, bytes):
                    rows[rank] = said
            # All who can are in the gather; it fails if somebody never comes.
            answer = [rows[r] for r in sorted(rows)] if len(rows) == len(orders) else None
            assert len({len(row) for row in rows.values()}) <= 1, "a gather of byte strings of unequal lengths"
            for rank in rows:
                self.pipes[rank].send(answer)
            rows = {}
        return out

    def close(self) -> None:
        """End all processes."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(("end",))
        for worker in self._workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self.pipes:
            pipe.close()
