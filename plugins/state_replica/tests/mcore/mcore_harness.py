"""Runs the Megatron job in one layout, with faults and without, and compares every rank's end bit for bit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from instep.messages import Injection
from instep.testing.faults import Faults
from instep.testing.finals import same
from instep.testing.jobs import JobRun, Jobs, Script

JOB = str(Path(__file__).with_name("mcore_job.py"))
GAP = 2
"""Steps between faults, so that the collectives of a recovery are not counted to the next fault's step."""
CROWD = 12
"""Faults in one job at the most."""
STEPS = GAP * (CROWD + 2)
SETTINGS = {"preload": ["mcore_warm"], "limits.recoveries_without_commit": 20, "limits.same_fault": 50, "watchdog.stall": 15.0}


@dataclass(frozen=True)
class Layout:
    """How the job is laid out. ``args`` as ``mcore_gpt.options`` takes them."""

    name: str
    args: tuple[str, ...]
    ranks: int = 4

    def __str__(self) -> str:
        return self.name

    def script(self, steps: int) -> Script:
        """The job of so many steps. Steps are the job's own limit: what comes behind the last one belongs to the comparison."""
        return Script(JOB, (*self.args, "--steps", str(steps)), ranks=self.ranks, steps=None)


TWINS = Layout("dp4-2-instances", ("--instances", "2"))
LAYOUTS = (
    TWINS,
    Layout("dp4-2-instances-fp32", ("--instances", "2", "--kind", "fp32")),
    Layout("tp2-dp2", ("--tp", "2", "--instances", "2")),
    Layout("pp2-dp2", ("--pp", "2", "--instances", "2")),
    Layout("ep2-experts", ("--ep", "2", "--experts", "4", "--instances", "2")),
    Layout("ep2-experts-plain", ("--ep", "2", "--experts", "4", "--plain")),
    Layout("plain", ("--plain", "--batch", "6"), ranks=3),
    Layout("plain-fp32", ("--plain", "--kind", "fp32", "--batch", "6"), ranks=3),
    Layout("plain-tp2", ("--plain", "--tp", "2")),
    Layout("overlap-grad", ("--instances", "2", "--overlap-grad")),
    Layout("overlap-both", ("--instances", "2", "--overlap-grad", "--overlap-param")),
    Layout("overlap-plain", ("--plain", "--overlap-grad", "--batch", "6"), ranks=3),
    Layout("fp16-skipped", ("--instances", "2", "--kind", "fp16", "--overflow")),
    Layout("fp16-plain", ("--plain", "--kind", "fp16", "--overflow", "--batch", "6"), ranks=3),
    Layout("interleaved", ("--pp", "2", "--virtual", "2", "--layers", "4", "--instances", "2")),
    Layout("tied-embeddings", ("--pp", "2", "--tied", "--instances", "2")),
    Layout("frozen", ("--instances", "2", "--frozen")),
    Layout("ramp-rerun", ("--instances", "2", "--gradual", "--rerun")),
)


def collectives(jobs: Jobs, layout: Layout) -> list[int]:
    """How many collectives each rank issues in a step."""
    trace = jobs.clean(layout.script(STEPS), SETTINGS).trace
    return [trace.steps[2, rank][0] for rank in range(layout.ranks)]


def run(jobs: Jobs, layout: Layout, faults: Faults | Iterable[Injection]) -> JobRun:
    """Run with faults, however it ends."""
    return jobs.run(layout.script(STEPS), tuple(faults), SETTINGS)


def check(
    jobs: Jobs,
    layout: Layout,
    faults: Faults | Iterable[Injection],
    *,
    lost: Sequence[int] = (),
    extra: tuple[str, ...] = (),
    settings: Mapping[str, object] = {},
    steps_lost: int = 0,
) -> JobRun:
    """Run with faults and require that each of them happened but those with an id in ``lost``, and that nothing else can be told.

    ``extra`` arguments and ``settings`` are for the run with faults alone, ``steps_lost`` is what an incident may cost.
    """
    script, placed = layout.script(STEPS), tuple(faults)
    clean = jobs.clean(script, SETTINGS)
    other = jobs.run(replace(script, args=(*script.args, *extra)), placed, {**SETTINGS, **settings})
    same(clean, other, placed, name=layout.name, ranks=layout.ranks, lost=lost, steps_lost=steps_lost)
    return other
