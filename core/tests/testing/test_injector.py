"""The fluent injector: it says what is meant, refuses what cannot be, and hands the same values to whatever plays them."""

from collections.abc import Sequence

import pytest

from instep.errors import UsageError
from instep.injection import POINTS
from instep.messages import Injection
from instep.testing import Faults, Jobs, Script
from instep.testing.jobs import DRILL_JOB


def test_a_sentence_becomes_an_injection(faults: Faults) -> None:
    faults.kill(rank=2).at(step=5, phase="backward").raises(rank=0).at(step=6, phase="forward|record").hang(rank=1, birth=1).at(
        phase="restore"
    )
    assert faults.placed == (
        Injection(id=1, rank=2, kind="kill", step=5, point="backward"),
        Injection(id=2, rank=0, kind="raise", step=6, point="forward|record"),
        Injection(id=3, rank=1, kind="hang", step=None, point="restore", birth=1),
    )
    assert [i.id for i in faults.missing([2])] == [1, 3]
    assert "kill 2@5 backward" in repr(faults)


def test_a_mark_of_the_script_needs_no_phase(faults: Faults) -> None:
    (injection,) = faults.kill(rank=0).at(step=1, mark="mid_forward")
    assert injection.point == "mid_forward"


@pytest.mark.parametrize("phase", POINTS)
def test_every_point_of_core_is_a_phase(phase: str) -> None:
    assert Faults().kill(rank=0).at(step=0, phase=phase).placed[0].point == phase


@pytest.mark.parametrize(
    ("rank", "step", "phase", "part"),
    [
        (0, 1, "backwards", "did you mean 'backward'"),
        (0, 1, "forward|nowhere", "no phase 'nowhere'"),
        (0, -1, "step", "from 0"),
        (-1, 0, "step", "from 0"),
    ],
)
def test_what_cannot_happen_is_refused(faults: Faults, rank: int, step: int, phase: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        faults.kill(rank=rank).at(step=step, phase=phase)
    assert len(faults) == 0


def test_a_stage_is_given_all_of_them(faults: Faults) -> None:
    class Theatre:
        def __init__(self) -> None:
            self.placed: list[Injection] = []

        def place(self, injections: Sequence[Injection]) -> None:
            self.placed += injections

    stage = Theatre()
    faults.kill(rank=1).at(step=3).kill(rank=0).at(step=4).on(stage)
    assert tuple(stage.placed) == faults.placed


def test_real_processes_play_them_and_end_as_without(job: Jobs, faults: Faults) -> None:
    """The sentence of the issue, under a real agent: a drill of instep's own job."""
    run = job.drill(Script(DRILL_JOB, module=True, ranks=3, steps=8), faults.kill(rank=2).at(step=5, phase="backward"))
    (incident,) = run.incidents
    assert (incident.fault.kind, incident.fault.ranks, incident.step) == ("exit", (2,), 5)
    assert run.missing == ()


def test_a_drill_tells_of_a_fault_that_never_happened(job: Jobs, faults: Faults) -> None:
    with pytest.raises(AssertionError, match=r"kill of rank 1 at barrier of step 900: never happened: \[1\]"):
        job.drill(Script(DRILL_JOB, module=True, ranks=3, steps=8), faults.kill(rank=1).at(step=900, phase="barrier"))
