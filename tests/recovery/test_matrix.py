"""The fault matrix: every place in a step, every kind of fault, at step 0, 1, later and last, on 3 and 4 ranks, all bitwise equal.

A row is one job with seven faults: two in step 0, two in step 1, two later, one in the last step. Of two faults in one step the first lies
before the commit barrier, so that the step is worked on again and the second one comes to pass. The rows together hold every combination
once; a seeded sample of them runs by default, all with ``-m full``.
"""

import random
from collections.abc import Iterator

import pytest

from tests.recovery.harness import BEFORE_BARRIER, BEHIND_BARRIER, KINDS, Fault, Jobs, Kind, Shape

STEPS = 12
LATER = (5, 8)
SAMPLE = 3
"""Rows of each group that run by default."""


def rows(ranks: int, *, workers: int, seed: int) -> Iterator[list[Fault]]:
    """All combinations of place, kind and step for one shape, packed into rows."""
    draw = random.Random(seed)
    before = {where: _shuffled(draw, BEFORE_BARRIER) for where in (0, 1, "later")}
    behind = {where: _shuffled(draw, BEHIND_BARRIER) for where in (0, 1, "later")}
    last = _shuffled(draw, (*BEFORE_BARRIER, *BEHIND_BARRIER, "done"))
    while any(before.values()) or any(behind.values()) or last:
        row: list[Fault] = []
        for where in (0, 1, "later"):
            for index, cases in enumerate((before[where], behind[where])):
                if cases:
                    kind, point = cases.pop()
                    row.append(Fault(kind, draw.randrange(ranks), point, LATER[index] if where == "later" else int(where)))
        if last:
            kind, point = last.pop()
            step = STEPS if point == "done" else STEPS - 1
            row.append(Fault(kind, draw.randrange(ranks), point, step))
        yield row


def _shuffled(draw: random.Random, points: tuple[str, ...]) -> list[tuple[Kind, str]]:
    cases = [(kind, point) for kind in KINDS for point in points]
    draw.shuffle(cases)
    return cases


def parameters() -> Iterator[object]:
    for ranks, workers in ((3, 0), (4, 0), (3, 2)):
        for index, row in enumerate(rows(ranks, workers=workers, seed=17 * ranks + workers)):
            marks = [] if index < SAMPLE - workers // 2 else [pytest.mark.full]
            yield pytest.param(ranks, workers, row, marks=marks, id=f"{ranks}-ranks-{workers}-workers-{index}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "workers", "row"), list(parameters()))
def test_every_fault_is_survived_bit_for_bit(jobs: Jobs, ranks: int, workers: int, row: list[Fault]) -> None:
    shape = Shape(ranks=ranks, steps=STEPS, workers=workers, extra=("--validate", "1"))
    jobs.check(shape, row)
