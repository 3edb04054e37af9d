"""Both twins of a shard are lost at once: Megatron goes back to a checkpoint in process, parameters derived from the shards again."""

from pathlib import Path

import pytest
from mcore_harness import SETTINGS, STEPS, TWINS, Layout

from instep.testing.faults import Faults
from instep.testing.finals import finals
from instep.testing.jobs import Jobs

AT = 6


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "layout", [pytest.param(TWINS, marks=pytest.mark.full), Layout("tp2-dp2", ("--tp", "2", "--instances", "2"))], ids=str
)
def test_both_twins_are_lost_and_the_rest_is_that_of_the_run_without_faults(layout: Layout, jobs: Jobs, tmp_path: Path) -> None:
    clean = jobs.clean(layout.script(STEPS), SETTINGS)
    twins = (1, 3)
    faults = Faults()
    for rank in twins:
        faults = faults.kill(rank=rank).at(step=AT, phase="body")
    table = {"dir": str(tmp_path / "checkpoints"), "every": 2}
    done = jobs.run(layout.script(STEPS), tuple(faults), {**SETTINGS, "plugins.state_replica": {"checkpoint": table}})
    assert done.outcome.code == 0, done.outcome.message
    (incident,) = done.outcome.incidents
    # Which one was complete by then depends on the storage.
    assert incident.scope == "checkpoint"
    assert incident.step in {2, 4, 6}
    assert incident.steps_lost == AT - incident.step
    assert incident.verified
    assert finals(done, layout.ranks) == finals(clean, layout.ranks)
