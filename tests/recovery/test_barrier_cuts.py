"""The commit barrier cut in every way: each set of victims, before, in and behind it, so that some pass and others do not."""

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.recovery.harness import Fault, Jobs, Kind, Shape

POINTS = ("prepared", "barrier", "body", "amid", "after")
GAP = 2


def cuts(ranks: int) -> list[tuple[int, ...]]:
    """Every set of victims that leaves a survivor."""
    return [victims for size in range(1, ranks) for victims in itertools.combinations(range(ranks), size)]


def jobs_of_cuts() -> Iterator[object]:
    kinds: tuple[Kind, ...] = ("kill", "raise")
    for ranks, kind, point in itertools.product((3, 4), kinds, POINTS):
        quick = ranks == 3 and (kind == "kill" or point in ("barrier", "body"))
        yield pytest.param(ranks, kind, point, marks=[] if quick else [pytest.mark.full], id=f"{ranks}-{kind}-{point}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ranks", "kind", "point"), list(jobs_of_cuts()))
def test_every_cut(jobs: Jobs, ranks: int, kind: Kind, point: str) -> None:
    """One job; a set of victims every other step. Not every victim is reached: a first one may end the step for all."""
    faults = [Fault(kind, rank, point, step=GAP * (i + 1)) for i, victims in enumerate(cuts(ranks)) for rank in victims]
    shape = Shape(ranks=ranks, steps=GAP * (len(cuts(ranks)) + 2))
    run = jobs.check(shape, faults, fired=False)

    assert len(run.incidents) >= len(cuts(ranks)) // 2


@pytest.mark.timeout(120)
def test_stopped_and_killed_around_the_barrier(jobs: Jobs) -> None:
    """One rank dies while another is stopped in the barrier: the stopped one is killed too, and both come back."""
    draw = random.Random(5)
    faults: list[Fault] = []
    for step in (2, 4, 6):
        killed, stopped = draw.sample(range(4), 2)
        faults += [Fault("kill", killed, draw.choice(POINTS), step), Fault("hang", stopped, "barrier", step)]
    jobs.check(Shape(ranks=4, steps=10), faults, fired=False)
