"""Fine-tuning of all parameters, from the weights of a checkpoint of NeMo's."""

import pytest
from nemo_harness import NemoRuns

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(300)  # real jobs on a busy machine


@pytest.fixture(scope="module")
def pretrained(runs: NemoRuns) -> str:
    """The folder of a checkpoint of a few steps."""
    ended = runs.run("--plain", "--save", "--steps", "4")
    assert ended.run.outcome.code == 0, ended.run.log(0)[-3000:]
    return str(ended.out / "pretrained")


def test_from_pretrained_weights(runs: NemoRuns, pretrained: str) -> None:
    """A replacement begins from the same weights and has the others' by then; nobody else loads them again."""
    faults = (
        Faults()
        .kill(rank=1).at(step=0, mark="microbatch_end")
        .kill(rank=0).at(step=2, phase="backward")
        .raises(rank=3).at(step=4, phase="amid")
        .kill(rank=2).at(step=6, mark="epoch_end")
        .kill(rank=3).at(step=9, phase="body")
    )  # fmt: skip
    args = ("--order", "batch", "--pretrained", pretrained)
    runs.check(faults, *args)

    plain = runs.check_plain(*args)
    first = [run.logged[0]["reduced_train_loss"] for run in (plain, runs.clean("--order", "batch"))]
    assert float(first[0]) < float(first[1]), "the weights were not loaded"
