"""READ THIS FIRST: a rank dies in mid-step, and the run ends bit for bit like one without a fault."""

import pytest

from tests.recovery.harness import Fault, Jobs, Shape

SHAPE = Shape(ranks=3, steps=12)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_is_back_in_step(jobs: Jobs, rank: int) -> None:
    """SIGKILL in the middle of the backward pass of step 5. Rank 0 is no different from the others."""
    run = jobs.check(SHAPE, [Fault("kill", rank, "mid_backward", step=5)])

    (incident,) = run.incidents
    assert (incident.fault.kind, incident.fault.ranks) == ("exit", (rank,))
    assert incident.step == 5
    assert incident.steps_lost == 0
    assert incident.verified
    assert incident.bytes_moved > 0
    assert {"reinit_comms", "restore_state", "resume_data", "verify"} <= {receipt.phase for receipt in incident.phases}
    assert incident.seconds_to_resume is not None
    assert incident.seconds_to_step is not None
    assert 0 < incident.seconds_to_resume < incident.seconds_to_step < 10


def test_a_death_behind_the_barrier_moves_the_step_forward(jobs: Jobs) -> None:
    """The others committed step 5 already, so the replacement gets the state of step 6: a step committed by all is never lost."""
    run = jobs.check(SHAPE, [Fault("kill", 1, "after", step=5)])

    (incident,) = run.incidents
    assert incident.step == 6


def test_an_exception_keeps_the_process(jobs: Jobs) -> None:
    """A rank that raises stays alive, and nothing needs to be moved: every rank still holds the state of its last commit."""
    run = jobs.check(SHAPE, [Fault("raise", 2, "mid_forward", step=5)])

    (incident,) = run.incidents
    assert incident.fault.kind == "exception"
    assert "InjectedFault" in incident.fault.detail
    assert incident.bytes_moved == 0


def test_a_hung_rank_is_replaced(jobs: Jobs) -> None:
    """A stopped process says nothing; the watchdog kills it, and its replacement takes over."""
    run = jobs.check(SHAPE, [Fault("hang", 0, "collective", step=5)])

    (incident,) = run.incidents
    assert (incident.fault.kind, incident.fault.ranks) == ("hang", (0,))
