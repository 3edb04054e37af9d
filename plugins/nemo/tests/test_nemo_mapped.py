"""Training data of a NeMo data module through ``mmap_loader``, by configuration alone."""

import pytest
from nemo_harness import NemoRuns

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(400)  # real jobs on a busy machine, and producers that import NeMo

MAPPED = {"plugins.nemo": {"memory_mapped": True}, "plugins.mmap_loader": True}


@pytest.mark.parametrize("layout", [(), ("--tensor-parallel", "2"), ("--order", "cyclic")], ids=["dp4", "tp2", "cyclic"])
def test_batches_outlive_their_trainer(runs: NemoRuns, layout: tuple[str, ...]) -> None:
    """The next micro-batches lie in shared memory when training goes on, with two ranks to a producer where they hold one model."""
    faults = (
        Faults()
        .kill(rank=0).at(step=2, mark="microbatch_end")
        .raises(rank=1).at(step=4, mark="step_end")
        .kill(rank=3).at(step=6, mark="epoch_start")
        .kill(rank=2).at(step=9, phase="body")
    )  # fmt: skip
    ended = runs.check(faults, *layout, settings=MAPPED)

    resumed = [phase for incident in ended.run.incidents for phase in incident.phases if phase.phase == "resume_data"]
    assert {phase.plugin for phase in resumed} >= {"mmap_loader"}


def test_the_other_plugin_is_named(runs: NemoRuns) -> None:
    ended = runs.run(settings={"plugins.nemo": {"memory_mapped": True}, "limits.same_fault": 1})

    assert ended.run.outcome.code != 0
    assert "set plugins.mmap_loader = true too" in ended.run.outcome.message
