"""Runs the sharded job in one layout, with faults and without, and compares every rank's end bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from instep import drill
from instep.messages import Injection
from instep.testing.faults import Faults
from instep.testing.finals import same
from instep.testing.jobs import JobRun, Jobs, Script

JOB = str(Path(__file__).with_name("sharded_job.py"))
SETTINGS: dict[str, object] = {"limits.recoveries_without_commit": 20, "limits.same_fault": 100, "watchdog.stall": 2.0}
PLACES = ("issue", "complete")
"""Before and after a collective."""


@dataclass(frozen=True)
class Layout:
    """How the job is laid out, by its arguments."""

    name: str
    args: tuple[str, ...]
    ranks: int = 4
    job: str = JOB

    def __str__(self) -> str:
        return self.name

    def script(self, steps: int) -> Script:
        """The job of so many steps. Steps are the job's own limit: what comes behind the last one belongs to the comparison."""
        return Script(self.job, (*self.args, "--steps", str(steps)), ranks=self.ranks, steps=None)


HSDP = Layout("hsdp-2x2", ("--mesh", "2x2"))
HSDP_SIX = Layout("hsdp-2x3", ("--mesh", "2x3"), ranks=6)


def collectives(jobs: Jobs, layout: Layout) -> list[int]:
    """How many collectives each rank issues in a step."""
    trace = jobs.clean(layout.script(4), SETTINGS).trace
    return [trace.steps[2, rank][0] for rank in range(layout.ranks)]


def run(jobs: Jobs, layout: Layout, faults: Faults | Iterable[Injection], *, steps: int) -> JobRun:
    """Run with faults, however it ends."""
    return jobs.run(layout.script(steps), tuple(faults), SETTINGS)


def check(
    jobs: Jobs, layout: Layout, faults: Faults | Iterable[Injection], *, steps: int, lost: Sequence[int] = (), extra: tuple[str, ...] = ()
) -> JobRun:
    """Run with faults and require that each of them happened but those with an id in ``lost``, and that nothing else can be told.

    ``extra`` arguments are for the run with faults alone.
    """
    script, placed = layout.script(steps), tuple(faults)
    clean, other = jobs.clean(script, SETTINGS), jobs.run(replace(script, args=(*script.args, *extra)), placed, SETTINGS)
    same(clean, other, placed, name=layout.name, ranks=layout.ranks, lost=lost)
    difference = drill.compare(clean.trace, other.trace, resumed=drill.resumed(other.incidents))
    assert difference is None, f"{layout.name}: {difference}"
    return other


def in_crowds(cases: Iterable[tuple[int, str]], size: int, *, first: int = 1, gap: int = 1) -> Iterator[Faults]:
    """Kills by rank and place, so many to a job, one each ``gap`` steps from the ``first`` on."""
    left = iter(cases)
    while crowd := list(islice(left, size)):
        faults = Faults()
        for index, (rank, place) in enumerate(crowd):
            faults.kill(rank=rank).at(step=first + gap * index, phase=place)
        yield faults
