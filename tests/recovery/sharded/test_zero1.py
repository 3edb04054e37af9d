"""ZeRO-1: what survivors can do alone, what needs a copy of a dead rank's partition, and what is refused."""

import pytest

from instep import drill
from instep.testing.faults import Faults
from instep.testing.finals import finals
from instep.testing.jobs import Jobs
from tests.recovery.sharded.harness import JOB as SHARDED
from tests.recovery.sharded.harness import PLACES, SETTINGS, Layout, check, collectives, in_crowds, run

JOB = SHARDED.replace("sharded_job", "zero1_job")
PLAIN = Layout("zero1", (), ranks=3, job=JOB)
BUCKETS = Layout("zero1-buckets-frozen", ("--buckets", "--frozen"), ranks=3, job=JOB)
BUDDIES = {**SETTINGS, "plugins.state_replica": {"buddies": True}}
PARTS = ("step", "forward", "backward", "record", "prepared")
"""Places at which an exception leaves every rank what it had."""
GAP = 2
"""Steps between deaths: a recovery hands parameters out, and its collectives count for the step that follows it."""
KILLED = ("backward", "prepared", "body", "applied", "after")


@pytest.mark.timeout(120)
def test_exceptions_before_the_update(job: Jobs) -> None:
    """Nothing is lost, so nothing has to be there twice; all parameters are handed out again."""
    faults = Faults()
    for index, place in enumerate(PARTS):
        faults.raises(rank=index % 3).at(step=index, phase=place)
    done = check(job, BUCKETS, faults, steps=len(PARTS) + 2)

    assert all("publish" in {receipt.phase for receipt in incident.phases} for incident in done.incidents)


@pytest.mark.timeout(120)
def test_a_death_names_the_partition(job: Jobs) -> None:
    done = run(job, PLAIN, Faults().kill(rank=1).at(step=3, phase="backward"), steps=6)

    assert done.outcome.code == 70
    assert "shard group 'optimizer.partition@1' of rank 1 has no replica left among ranks [1]" in done.outcome.message


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", [PLAIN, BUCKETS], ids=str)
def test_deaths_with_copies_on_a_buddy(job: Jobs, layout: Layout) -> None:
    """Each place of the update, and some collectives; the broadcasts of the update among them."""
    last = min(collectives(job, layout))
    faults = Faults()
    for index, place in enumerate([*KILLED, "issue#1", f"issue#{last}", f"complete#{last - 2}"]):
        faults.kill(rank=index % 3).at(step=GAP * index + 1, phase=place)
    _equal_but_for_a_step(job, layout, faults)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [PLAIN, BUCKETS], ids=str)
def test_every_rank_at_every_collective(job: Jobs, layout: Layout) -> None:
    counts = collectives(job, layout)
    every = [(r, f"{place}#{k}") for r, count in enumerate(counts) for k in range(1, count + 1) for place in PLACES]
    for faults in in_crowds(every, 8, gap=GAP):
        _equal_but_for_a_step(job, layout, faults)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("overlap", "with overlap_with_ddp=True parameters change during the backward pass"),
        ("scaler", "train in bfloat16, which needs no scaler"),
        ("two", "one ZeroRedundancyOptimizer: give all parameters to 'optimizer'"),
        ("closure", "optimizer.step(closure) would train inside the commit's body"),
        ("thaw", "requires_grad of a parameter changed since the optimizer was built"),
    ],
)
def test_refused(job: Jobs, what: str, message: str) -> None:
    ended = run(job, Layout(what, ("--refused", what), ranks=2, job=JOB), (), steps=4)

    assert ended.outcome.code != 0
    assert message in ended.outcome.message + ended.log(0)


def _equal_but_for_a_step(job: Jobs, layout: Layout, faults: Faults) -> None:
    script = layout.script(max(i.step or 0 for i in faults) + 3)
    clean, other = job.clean(script, BUDDIES), job.run(script, faults, BUDDIES)
    story = f"{layout.name}: " + ", ".join(f"{i.kind} {i.rank}@{i.step} {i.point}" for i in faults)
    assert other.outcome.code == 0, f"{story}: {other.outcome.message}"
    assert finals(other, layout.ranks) == finals(clean, layout.ranks), story
    assert (at := drill.compare(clean.trace, other.trace, resumed=drill.resumed(other.incidents))) is None, f"{story}: {at}"
    assert all(i.scope == "in_process" and i.steps_lost <= 1 and i.verified for i in other.incidents), f"{story}: {other.incidents}"
    assert not other.missing, f"{story}: never happened: {other.missing}"
