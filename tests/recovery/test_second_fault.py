"""A fault during a recovery: in every phase, on the newcomer, the donor or another survivor, and two victims at once."""

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.recovery.harness import IN_RECOVERY, KINDS, Fault, Jobs, Shape

VICTIM, STEP = 1, 5
WHO = {"newcomer": VICTIM, "donor": 0, "survivor": 2}
SAMPLE = 10


def second_faults() -> Iterator[object]:
    cases = [("setup", "newcomer"), *itertools.product(IN_RECOVERY, WHO)]
    all_of_them = [(kind, point, who) for kind in KINDS for point, who in cases if (point, who) != ("mid_transfer", "survivor")]
    random.Random(3).shuffle(all_of_them)
    for index, (kind, point, who) in enumerate(all_of_them):
        yield pytest.param(kind, point, who, marks=[pytest.mark.full] if index >= SAMPLE else [], id=f"{kind}-{point}-{who}")


@pytest.mark.parametrize(("kind", "point", "who"), list(second_faults()))
def test_a_fault_in_a_recovery_opens_the_next_attempt(jobs: Jobs, kind: str, point: str, who: str) -> None:
    first = Fault("kill", VICTIM, "mid_backward", step=STEP)
    second = Fault(kind, WHO[who], point, step=None if who == "newcomer" else STEP, birth=1 if who == "newcomer" else 0)  # type: ignore[arg-type]
    run = jobs.check(Shape(ranks=3, steps=8), [first, second])

    (incident,) = run.incidents
    assert incident.fault.ranks == (VICTIM,)
    assert len(incident.attempts) >= 2


@pytest.mark.parametrize(
    "points", [("mid_forward", "mid_forward"), ("mid_backward", "prepared"), ("amid", "amid"), ("record", "record")], ids="-".join
)
def test_two_victims_of_four(jobs: Jobs, points: tuple[str, str]) -> None:
    one, other = points
    run = jobs.check(Shape(ranks=4, steps=8), [Fault("kill", 0, one, step=STEP), Fault("kill", 2, other, step=STEP)])

    assert {rank for incident in run.incidents for attempt in incident.attempts for rank in attempt.fault.ranks} == {0, 2}
