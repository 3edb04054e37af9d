"""One instance of the distributed optimizer: no other rank holds a shard, so buddies keep copies."""

import pytest
from mcore_harness import GAP, Layout, check

from instep.testing.faults import Faults
from instep.testing.jobs import Jobs

ALONE = Layout("one-instance", ())
TOGETHER = {"plugins.state_replica.buddies": True}
PLACES = ("backward", "issue#2", "barrier", "body", "amid", "applied", "after", "step")


@pytest.mark.timeout(240)
def test_victims_in_turn(jobs: Jobs) -> None:
    """At most a step is done again, and the end is the same."""
    faults = Faults()
    for index, place in enumerate(PLACES):
        faults.kill(rank=index % ALONE.ranks).at(step=GAP * (index + 1), phase=place)
    done = check(jobs, ALONE, faults, settings=TOGETHER, steps_lost=1)

    assert len(done.incidents) == len(PLACES)
