"""What connects simulated ranks: meetings of all of them, parcels between two, and the barrier of the machine.

A connection belongs to one incarnation. When a rank dies or shuts its connections, whoever waits for it fails; one that is gone
without a word (a dead host, a stopped process) lets its peers wait.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

from instep.testing.simulator.clock import Clock, Task, here

if TYPE_CHECKING:
    from instep.testing.simulator.checks import Checks

LATENCY = 0.001
"""Seconds that anything between two ranks takes at most, unless a rank is slow."""


class Peer(Protocol):
    """A process as the network knows it."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def birth(self) -> int:
        """Its birth."""


class Meeting:
    """One collective: complete when every rank has arrived, failed for those that wait for one that is cut off."""

    def __init__(self, network: "Network", key: tuple[int, Hashable], world: int) -> None:
        self.values: dict[int, object] = {}
        self.births: dict[int, int] = {}
        self.outcome: dict[int, bool] = {}
        self.waiting: dict[int, Task] = {}
        self._network, self._key, self._world = network, key, world

    @property
    def complete(self) -> bool:
        """Whether every rank has arrived."""
        return len(self.values) == self._world

    def arrive(self, peer: Peer, value: object) -> None:
        """A rank is there."""
        network, cut = self._network, self._network.cut.get(self._key[0], ())
        self.values[peer.rank], self.births[peer.rank] = value, peer.birth
        if self.complete:
            network.checks.met(self._key[0], self.births)
            for rank in self.values:
                network.clock.after(network.clock.soon(LATENCY), self._settle, rank, True)
        elif any(rank not in self.values for rank in cut):
            network.clock.after(network.clock.soon(LATENCY), self._settle, peer.rank, False)

    def broke(self, rank: int) -> None:
        """A rank's connections are gone: who waits for it fails, and some to whom it had sent something do too."""
        clock = self._network.clock
        for other in self.values:
            if other != rank and other not in self.outcome and (not self.complete or clock.random.random() < 0.5):
                clock.after(clock.soon(LATENCY), self._settle, other, False)

    def wait(self, rank: int, seconds: float) -> bool | None:
        """How it ended for a rank, ``None`` while it has not."""
        if rank not in self.outcome:
            self.waiting[rank] = here()
            here().park(seconds)
            self.waiting.pop(rank, None)
        return self.outcome.get(rank)

    def _settle(self, rank: int, well: bool) -> None:
        if rank not in self.outcome:
            self.outcome[rank] = well
            if task := self.waiting.get(rank):
                task.wake()
            if len(self.outcome) == self._world:
                self._network.meetings[self._key[0]].pop(self._key[1], None)


class Network:
    """All connections of one start of the job."""

    def __init__(self, clock: Clock, world: int, checks: "Checks") -> None:
        self.clock, self.world, self.checks = clock, world, checks
        self.meetings: dict[int, dict[Hashable, Meeting]] = {}
        self.cut: dict[int, set[int]] = {}
        self.parcels: dict[Hashable, object] = {}
        self.waiting: dict[Hashable, Task] = {}
        self.barrier = Row()

    def meeting(self, incarnation: int, what: Hashable) -> Meeting:
        """The meeting of an incarnation, made by whoever comes first."""
        there = self.meetings.setdefault(incarnation, {})
        if (found := there.get(what)) is None:
            found = there[what] = Meeting(self, (incarnation, what), self.world)
        return found

    def shut(self, rank: int, incarnation: int) -> None:
        """Cut a rank off in an incarnation, and tell its peers."""
        cut = self.cut.setdefault(incarnation, set())
        if rank not in cut:
            cut.add(rank)
            for meeting in list(self.meetings.get(incarnation, {}).values()):
                meeting.broke(rank)
            for task in list(self.waiting.values()):
                task.wake()

    def lost(self, incarnation: int, rank: int) -> bool:
        """Whether a rank's connections in an incarnation are known to be gone."""
        return rank in self.cut.get(incarnation, ())

    def post(self, key: Hashable, value: object) -> None:
        """Send a parcel to whoever waits for ``key``."""
        self.clock.after(self.clock.soon(LATENCY), self._arrived, key, value)

    def fetch(self, key: Hashable, seconds: float, lost: Callable[[], bool]) -> object | None:
        """A parcel, ``None`` if there is none within ``seconds`` or before its sender is ``lost``."""
        if key not in self.parcels and not lost():
            self.waiting[key] = here()
            here().park(seconds)
            self.waiting.pop(key, None)
        return self.parcels.get(key)

    def _arrived(self, key: Hashable, value: object) -> None:
        self.parcels[key] = value
        if task := self.waiting.get(key):
            task.wake()


class Row:
    """The barrier of a machine: one word a rank in each of two rows, see ``instep.agent.barrier``; a dead rank's words stay."""

    def __init__(self) -> None:
        self.words: tuple[dict[int, tuple[int, int, int]], ...] = ({}, {})
        self.passed: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, Task] = {}


class Barrier:
    """One rank's side of it, with the interface of ``instep.agent.barrier.NodeBarrier``."""

    def __init__(self, row: Row, *, rank: int, world: int) -> None:
        self._row, self._rank, self._world = row, rank, world
        self._incarnation = self._number = 0

    def arrive(self, incarnation: int, code: int) -> None:
        """Tell the others that this rank is there."""
        if incarnation != self._incarnation:
            self._incarnation, self._number = incarnation, 0
        self._number += 1
        self._words[self._rank] = incarnation, self._number, code
        if self._complete():
            for task in self._row.waiting.values():
                task.wake()

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have arrived; waits up to ``seconds`` for them."""
        if not self._complete():
            self._row.waiting[self._rank] = here()
            here().park(seconds)
            self._row.waiting.pop(self._rank, None)
        return self._complete()

    def agreed(self) -> bool:
        """Whether all ranks arrived with the same code."""
        return len({word[2] for word in self._words.values()}) == 1

    def passed(self) -> None:
        """Tell the others that this rank goes on from the last barrier."""
        self._row.passed[self._rank] = self._incarnation, self._number

    def behind(self, incarnation: int, seconds: float) -> bool:
        """Whether all ranks have passed the last barrier that this rank did; waits up to ``seconds``."""
        if incarnation == self._incarnation and self._number and not self._followed():
            here().park(seconds)
        return incarnation != self._incarnation or not self._number or self._followed()

    def _followed(self) -> bool:
        return len(self._row.passed) == self._world and set(self._row.passed.values()) == {(self._incarnation, self._number)}

    @property
    def _words(self) -> dict[int, tuple[int, int, int]]:
        return self._row.words[self._number % 2]

    def _complete(self) -> bool:
        words = self._words
        return len(words) == self._world and all(word[:2] == (self._incarnation, self._number) for word in words.values())
