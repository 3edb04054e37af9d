"""One simulated job from its first process to its end, and the script that its ranks train by."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from instep.agent import events as ev
from instep.agent.records import State
from instep.block import Blocks
from instep.commit import Commit
from instep.engine import Engine
from instep.errors import InstepError
from instep.testing.simulator import model
from instep.testing.simulator.agent import Agent
from instep.testing.simulator.checks import Checks
from instep.testing.simulator.clock import Clock
from instep.testing.simulator.network import Network
from instep.testing.simulator.plugin import none
from instep.testing.simulator.process import Memory, Process
from instep.testing.simulator.rank import Rank, main
from instep.testing.simulator.schedule import Schedule, Trouble

if TYPE_CHECKING:
    from instep.torch.local import LocalRank

_UNRAISED = ("tell", "plan", "ended")
"""Places where nothing can raise."""


class World:
    """Everything of one simulated job."""

    def __init__(self, schedule: Schedule, *, measure: bool = False, trace: Callable[[str], None] | None = None) -> None:
        self.schedule, self._trace = schedule, trace
        self.clock = Clock(schedule.seed)
        self.everyone = tuple(range(schedule.world))
        self.reference = model.Reference.of(schedule.world, schedule.steps, schedule.seed)
        self.no_plugins = none()
        self.happened: list[tuple[Trouble, str]] = []
        self.last_trouble = 0.0
        self.astray = 0
        self.life = -1
        self._pending = list(schedule.troubles)
        self._places = [0] * schedule.world
        self._passed: dict[tuple[int, str], int] = {}
        self._since: list[int] | None = None
        self.checks = Checks(self)
        self.begin_life()
        self.agent = Agent(self, measure=measure)

    def begin_life(self) -> None:
        """Nothing is left of an earlier start of the job."""
        self.life += 1
        self.memories = [Memory() for _ in self.everyone]
        self.checks.begin_life()
        self.network = Network(self.clock, self.schedule.world, self.checks)

    def process(self, rank: int, birth: int) -> Process:
        """A new birth of a rank."""
        return Process(self, rank, birth, main(train))

    def run(self) -> "Outcome":
        """Run to the end. Raises ``Violation``."""
        try:
            self.agent.start()
            while not self.agent.over and not self.checks.found and self.clock.step():
                pass
            if self.checks.found is not None:
                raise self.checks.found
            self.checks.ended()
        finally:
            self.clock.close()
        return Outcome.of(self)

    def due(self, rank: int, name: str) -> Iterator[Trouble]:
        """The troubles that befall a rank at this place."""
        if self._pending:
            self._places[rank] += 1
            passed = self._passed[rank, name] = self._passed.get((rank, name), 0) + 1
            for trouble in [t for t in self._pending if t.rank == rank and self._fits(t, name, passed)]:
                self._pending.remove(trouble)
                yield trouble

    def _fits(self, trouble: Trouble, name: str, passed: int) -> bool:
        places = self._places[trouble.rank]
        if trouble.kind == "raise" and name in _UNRAISED:
            return False
        if trouble.place is not None:
            return places >= trouble.place
        if trouble.after is not None:
            return self._since is not None and places >= self._since[trouble.rank] + trouble.after
        return trouble.point == name and passed > trouble.skip

    def struck(self, trouble: Trouble) -> None:
        """A trouble is happening."""
        state = self.memories[trouble.rank].words.progress().state
        live = self.agent.coordinator.job.life.live
        self.happened.append(
            (trouble, "setup" if not live else "outside" if state in (State.OUTSIDE, State.ENDED, State.DONE) else "block")
        )
        self.last_trouble, self._since = self.clock.now, self._places.copy()
        self.trace("TROUBLE", trouble)

    def mishap(self) -> None:
        """A message goes astray."""
        self.astray += 1
        self.last_trouble = self.clock.now

    def trace(self, text: str, what: object = "") -> None:
        """One line for whoever looks on."""
        if self._trace is not None:
            self._trace(f"{self.clock.now:9.4f}  {text} {what}")

    def picture(self) -> str:
        """Where each rank stands, for the message of a violation."""
        members = self.agent.coordinator.job.members
        rows = []
        for rank, process in sorted(self.agent.processes.items()):
            p = self.memories[rank].words.progress()
            how = "dead" if process.dead else "stopped" if process.stopped else "hung" if process.hung else "alive"
            rows.append(f"rank {rank}.{process.birth} {how} in {p.state.name.lower()} ({p.operation}) at {p.block}/{p.step}")
            rows[-1] += f", voted {members[rank].vote is not None}"
        return "; ".join(rows)


def train(rank: Rank) -> None:
    """The script: blocks of steps, each of which draws, sums over all ranks, and commits."""
    engine = Engine(cast("LocalRank", rank))
    commit = Commit(engine)
    blocks = Blocks(engine, commit)
    for number, end in enumerate(rank.world.schedule.blocks):
        value = blocks.decorate(lambda end=end, number=number: _block(rank, engine, commit, end, number))()
        if value != number:
            raise InstepError(f"block {number} returned {value!r}")
        rank.point("between")


def _block(rank: Rank, engine: Engine, commit: Commit, end: int, number: int) -> int:
    world, sums = rank.world, rank.world.schedule.sums
    while engine.step < end:
        rank.point("loader")
        rank.gate.check()
        drawn = rank.state.private.draw()
        rank.point("forward")
        part = model.mix(drawn, rank.shared[0])
        if sums == 0:  # what an all-reduce would give, from ranks that compute it alone
            drawn_by_all = world.reference.private[engine.step + 1]
            total = sum(model.mix(p, rank.shared[0]) for p in drawn_by_all) & model.MASK
        for number_of in range(sums):
            rank.gate.check()
            values = rank.collective(f"sum {number_of}", part)
            total = sum(cast("list[int]", [*values.values()])) & model.MASK
            rank.point("backward")
        with commit:
            new = model.moved(rank.shared, total)
            rank.shared = new[0], rank.shared[1]
            rank.point("amid")
            rank.shared = new
    return number


@dataclass(frozen=True)
class Outcome:
    """How a simulated job ended. ``events`` the clock handled; ``seconds`` of virtual time."""

    schedule: Schedule
    end: ev.Finish
    happened: tuple[tuple[Trouble, str], ...]
    incidents: int
    incarnations: int
    restarts: int
    seconds: float
    events: int

    @classmethod
    def of(cls, world: World) -> "Outcome":
        """Sum up a world that has ended."""
        job = world.agent.coordinator.job
        end = cast("ev.Finish", world.agent.end)
        opened = job.life.incarnation
        return cls(world.schedule, end, tuple(world.happened), job.incidents, opened, job.restarts, world.clock.now, world.clock.events)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log of what goes wrong on purpose, and without a collector that looks through all of torch each time."""
    log = logging.getLogger("instep")
    before, log.propagate = log.level, False
    log.setLevel(logging.CRITICAL + 1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        log.setLevel(before)
        log.propagate = True
