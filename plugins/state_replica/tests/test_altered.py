"""A whole job with an altered donor: it ends by name, and not one step is trained on a state that is in doubt."""

from pathlib import Path

import pytest

from instep.testing import Faults, Jobs, Script

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine
JOB = str(Path(__file__).with_name("altered_job.py"))


@pytest.mark.parametrize(
    ("ranks", "altered", "says"),
    [
        (4, 1, "ranks [1] differ from ranks [0, 2, 3]"),
        (4, 0, "ranks [0, 3] differ from ranks [1, 2]"),
        (3, 1, "ranks [0, 2] and ranks [1] differ"),
    ],
)
def test_a_job_with_an_altered_donor_ends_by_name(job: Jobs, faults: Faults, ranks: int, altered: int, says: str) -> None:
    fault = faults.kill(rank=ranks - 1).at(step=5, phase="forward")
    run = job.run(Script(JOB, (str(altered),), ranks=ranks, steps=8), fault)
    assert run.outcome.code == 70
    assert f"shard group 'replica': {says}" in run.outcome.message
    assert not run.missing
    assert run.trace.length == 5, "steps were committed after the fault"
