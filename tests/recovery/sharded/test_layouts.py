"""Every way to use ``fully_shard`` that changes what a rank holds or what an interruption leaves: deaths and exceptions in each."""

import pytest

from instep.testing.faults import Faults
from instep.testing.jobs import Jobs
from tests.recovery.sharded.harness import Layout, check, collectives, run


def layout(name: str, *args: str, features: str = "", ranks: int = 4) -> Layout:
    return Layout(name, (*(args or ("--mesh", "2x2")), *(("--features", features) if features else ())), ranks=ranks)


LAYOUTS = (
    layout("accumulate-mixed", features="accumulate,mixed,ema"),
    layout("accumulate-keep-tied", "--mesh", "2x2", "--forward", "0", features="accumulate,keep,tied"),
    layout("tensor-parallel", "--mesh", "2x1x2", "--width", "18", features="unclipped"),
    layout("frozen-foreach", "--mesh", "2x2", "--optimizer", "foreach", features="frozen"),
    layout("fused-offload-grouped", "--mesh", "2x2", "--optimizer", "fused", features="offload,grouped"),
    layout("sgd-reshard", "--mesh", "2x2", "--optimizer", "sgd", "--forward", "1", features="accumulate,frozen"),
    layout("tensor-parallel-of-eight", "--mesh", "2x2x2", "--width", "18", features="unclipped", ranks=8),
)
QUICK = ("accumulate-mixed", "accumulate-keep-tied", "tensor-parallel", "frozen-foreach")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[] if each.name in QUICK else [pytest.mark.full]) for each in LAYOUTS], ids=str
)
def test_deaths_and_exceptions(job: Jobs, layout: Layout) -> None:
    """From step 0 on, where no optimizer has any state. Exceptions keep the process, with all that the cut step left in it."""
    last = min(collectives(job, layout))
    faults = Faults().raises(rank=1).at(step=0, phase="step").kill(rank=0).at(step=0, phase="backward")
    faults.raises(rank=2).at(step=1, phase=f"issue#{last // 3}").kill(rank=3).at(step=2, phase=f"complete#{last // 2}")
    faults.raises(rank=0).at(step=3, phase=f"complete#{2 * last // 3}").kill(rank=1).at(step=4, phase="amid")
    faults.raises(rank=3).at(step=5, phase="body").raises(rank=2).at(step=6, phase=f"issue#{last}")
    check(job, layout, faults, steps=9)


@pytest.mark.timeout(60)
def test_one_dimension_without_copies(job: Jobs) -> None:
    """Nobody else holds a rank's shards: an exception before the update costs nothing, a death names the shards."""
    alone = layout("fsdp", "--mesh", "3", ranks=3)
    check(job, alone, Faults().raises(rank=1).at(step=1, phase="backward").raises(rank=0).at(step=2, phase="prepared"), steps=5)
    ended = run(job, alone, Faults().kill(rank=1).at(step=2, phase="backward"), steps=5)

    assert ended.outcome.code == 70
    assert "shard group 'shards@1' of rank 1 has no replica left among ranks [1]" in ended.outcome.message
