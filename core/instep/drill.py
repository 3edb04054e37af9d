"""A drill: the same script with and without faults, and the first place where the two runs differ, if any."""

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from instep.errors import UsageError
from instep.injection import POINTS
from instep.messages import Injection
from instep.model import IncidentReport, Value

Kind = Literal["kill", "raise", "hang"]
ANYWHERE = [
    "step",
    "forward|record",
    "backward|record",
    "collective|record",
    "record",
    "prepared",
    "barrier",
    "body",
    "amid|after",
    "after",
]
"""Points among which a drill draws: each is reached in every step of every script."""


class Order(Value):
    """A fault asked for: once, when the rank first works on the step (from 0)."""

    kind: Kind
    rank: int
    step: int


class Difference(Value):
    """The first thing that is not bitwise equal: a collective's result in a step, or a piece of the state at the end."""

    step: int
    rank: int
    name: str


class Verdict(Value):
    """What a drill found. ``ok``: all faults happened, both runs ended well, and nothing differs."""

    ok: bool
    bitwise_equal: bool
    first_difference: Difference | None
    deterministic: bool
    steps: int
    incidents: tuple[IncidentReport, ...]


@dataclass(frozen=True)
class Trace:
    """What one run left behind: number and digest of collective results by (step, rank), and digests of each rank's state at its end."""

    steps: Mapping[tuple[int, int], tuple[int, str]]
    states: tuple[Mapping[str, str], ...]

    @property
    def length(self) -> int:
        """Number of steps that any rank committed."""
        return 1 + max((step for step, _ in self.steps), default=-1)


def read(directory: Path, ranks: int) -> Trace:
    """The trace in a drill's directory. A line that a killed worker left unfinished is skipped."""
    steps: dict[tuple[int, int], tuple[int, str]] = {}
    states: list[Mapping[str, str]] = []
    for rank in range(ranks):
        lines = directory / f"rank-{rank}.steps.jsonl"
        for line in lines.read_text().splitlines() if lines.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            steps[entry["step"], rank] = entry["collectives"], entry["digest"]
        state = directory / f"rank-{rank}.state.json"
        states.append(json.loads(state.read_text()) if state.exists() else {})
    return Trace(steps, tuple(states))


def compare(clean: Trace, other: Trace, *, resumed: Collection[int] = ()) -> Difference | None:
    """The first difference, by step, then rank, then name. ``resumed`` are the steps at which recoveries of ``other`` went on.

    A rank that died right behind a commit has no digest for that step, and its replacement starts at the next one; so a digest may lack
    on some ranks, but not on all. In a resumed step the number of collectives may differ, since DDP agrees on its buckets once, in the
    second forward pass, and a recovery before that settles them; what counts there is the state that the step leads to.
    """
    known = {step for step, _ in other.steps}
    for (step, rank), (count, digest) in sorted(clean.steps.items()):
        if step not in known:
            return Difference(step=step, rank=rank, name="missing step")
        its_count, its_digest = other.steps.get((step, rank), (count, digest))
        if its_digest != digest and (its_count == count or step not in resumed):
            return Difference(step=step, rank=rank, name="collectives")
    for step, rank in sorted(other.steps):
        if step >= clean.length:
            return Difference(step=step, rank=rank, name="additional step")
    return _compare_states(clean, other)


def _compare_states(clean: Trace, other: Trace) -> Difference | None:
    for rank, (ours, theirs) in enumerate(zip(clean.states, other.states, strict=True)):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return Difference(step=clean.length, rank=rank, name=name)
        if not ours:
            return Difference(step=clean.length, rank=rank, name="final state")
    return None


def resumed(incidents: Sequence[IncidentReport]) -> set[int]:
    """The steps at which recoveries went on, and those before: an incident of several attempts may have moved forward a step with each.

    What the step before would have handed out at its end, as sharded optimizers do, the recovery does in its place.
    """
    return {incident.step - back for incident in incidents for back in range(len(incident.attempts) + 1)}


def points() -> dict[str, str]:
    """The points among which a drill draws, in the order of a step, and where each lies."""
    drawn = {choice.partition("|")[0] for choice in ANYWHERE}
    return {name: where for name, where in POINTS.items() if name in drawn}


def injections(orders: Sequence[Order], *, seed: int) -> list[Injection]:
    """Each order at a point drawn from the seed."""
    draw = random.Random(seed)
    return [Injection(id=i, rank=o.rank, kind=o.kind, step=o.step, point=draw.choice(ANYWHERE)) for i, o in enumerate(orders, start=1)]


def selection(*, steps: int, ranks: int, seed: int) -> list[Order]:
    """One fault of each kind, spread over the run, when none was asked for."""
    draw = random.Random(f"selection {seed}")
    third = max(1, steps // 3)
    kinds: tuple[Kind, ...] = ("kill", "raise", "hang")
    return [
        Order(kind=kind, rank=draw.randrange(ranks), step=min(steps - 1, i * third + draw.randrange(third))) for i, kind in enumerate(kinds)
    ]


def check(orders: Sequence[Order], *, steps: int, ranks: int) -> None:
    """Raises ``UsageError`` for a fault that cannot happen."""
    for order in orders:
        if not 0 <= order.rank < ranks:
            raise UsageError(f"--{order.kind} {order.rank}@{order.step}: the job has the ranks 0 to {ranks - 1}")
        if not 0 <= order.step < steps:
            raise UsageError(f"--{order.kind} {order.rank}@{order.step}: the run works on the steps 0 to {steps - 1}")
