"""Faults in every part of a training of NeMo: the run ends bit for bit as one without, and every line is logged once."""

import pytest
from nemo_harness import NemoRuns

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(300)  # real jobs on a busy machine

LAYOUTS = pytest.mark.parametrize(
    "layout", [(), ("--peft",), ("--tensor-parallel", "2"), ("--tensor-parallel", "2", "--peft")], ids=lambda x: " ".join(x) or "dp4"
)
ORDERS = {(): 6, ("--tensor-parallel", "2", "--workers", "1"): 5, ("--limit", "5"): 4}
"""Uses of a random order, and the step before which an epoch ends: NeMo's epochs are as long as its sampler says when they begin."""


@LAYOUTS
def test_kills(runs: NemoRuns, layout: tuple[str, ...]) -> None:
    """12 steps of 2 epochs, validated twice in each: a rank dies in every part of them, the last time behind the last batch."""
    faults = (
        Faults()
        .kill(rank=0).at(step=0, mark="microbatch_end")
        .kill(rank=1).at(step=1, phase="backward")
        .kill(rank=2).at(step=2, mark="step_end")
        .kill(rank=3).at(step=3, mark="validation")
        .kill(rank=0).at(step=4, phase="amid")
        .kill(rank=1).at(step=5, phase="prepared")
        .kill(rank=2).at(step=6, mark="epoch_end")
        .kill(rank=3).at(step=7, phase="barrier")
        .kill(rank=0).at(step=8, mark="batch_end")
        .kill(rank=1).at(step=9, phase="applied")
        .kill(rank=2).at(step=10, phase="body")
        .kill(rank=3).at(step=11, phase="after")
        .kill(rank=0).at(step=12, mark="batch_end")
    )  # fmt: skip
    runs.check(faults, *layout)


@LAYOUTS
def test_exceptions_and_hangs(runs: NemoRuns, layout: tuple[str, ...]) -> None:
    """The survivor itself is the one that is cut; and ranks that say nothing any more."""
    faults = (
        Faults()
        .raises(rank=3).at(step=0, mark="batch_start")
        .raises(rank=0).at(step=1, mark="microbatch_end")
        .raises(rank=1).at(step=2, phase="backward")
        .hang(rank=2).at(step=3, mark="validation")
        .raises(rank=2).at(step=4, phase="body")
        .raises(rank=0).at(step=5, phase="amid")
        .raises(rank=3).at(step=6, mark="epoch_start")
        .hang(rank=0).at(step=7, mark="microbatch_end")
        .raises(rank=1).at(step=8, mark="batch_end")
        .raises(rank=2).at(step=9, mark="validation")
        .hang(rank=1).at(step=10, phase="body")
        .raises(rank=3).at(step=12, mark="epoch_end")
    )  # fmt: skip
    runs.check(faults, *layout)


@pytest.mark.parametrize("layout", [(), ("--peft", "--sanity", "2"), ("--tensor-parallel", "2")], ids=["dp4", "peft", "tp2"])
def test_set_up(runs: NemoRuns, layout: tuple[str, ...]) -> None:
    """A replacement dies in its set-up, and another at its first step."""
    faults = (
        Faults().kill(rank=1).at(step=2, phase="backward").kill(rank=1, birth=1).at(phase="setup")
        .kill(rank=0).at(step=3, mark="batch_end").kill(rank=0, birth=1).at(step=3, mark="step_start")
    )  # fmt: skip
    runs.check(faults, *layout)


def test_pipeline(runs: NemoRuns) -> None:
    """Two stages, of which each has its own part of the model: both are cut, in a step and in validation."""
    faults = (
        Faults()
        .kill(rank=0).at(step=0, mark="microbatch_end")
        .kill(rank=3).at(step=1, phase="backward")
        .raises(rank=2).at(step=2, mark="step_end")
        .kill(rank=2).at(step=3, mark="validation")
        .kill(rank=1).at(step=5, phase="amid")
        .kill(rank=3).at(step=6, mark="epoch_end")
        .hang(rank=1).at(step=8, phase="body")
        .kill(rank=0).at(step=12, mark="batch_end")
    )  # fmt: skip
    runs.check(faults, "--pipeline", "2")
    runs.check_plain("--pipeline", "2")


def test_whole_global_batches(runs: NemoRuns) -> None:
    """As in fine-tuning: a step is given one batch, and splits it."""
    faults = (
        Faults()
        .kill(rank=0).at(step=1, mark="microbatch_end")
        .kill(rank=3).at(step=3, mark="validation")
        .raises(rank=2).at(step=5, phase="backward")
        .kill(rank=1).at(step=6, mark="epoch_start")
        .kill(rank=2).at(step=8, phase="amid")
        .kill(rank=0).at(step=12, mark="epoch_end")
    )  # fmt: skip
    runs.check(faults, "--order", "batch")


@pytest.mark.parametrize("more", ORDERS, ids=lambda x: " ".join(x) or "dp4")
def test_random_order(runs: NemoRuns, more: tuple[str, ...]) -> None:
    """Megatron's random samplers move as they are drawn, of the training data and of the validation data, and their length with them."""
    faults = (
        Faults()
        .kill(rank=0).at(step=0, mark="microbatch_end")
        .raises(rank=2).at(step=2, mark="step_end")
        .kill(rank=1).at(step=3, phase="amid")
        .kill(rank=2).at(step=ORDERS[more], mark="epoch_end")
        .hang(rank=3).at(step=7, phase="backward")
        .kill(rank=0).at(step=8, mark="batch_end")
        .kill(rank=2).at(step=10, phase="body")
        .raises(rank=1).at(step=11, mark="microbatch_end")
    )  # fmt: skip
    runs.check(faults, "--order", "cyclic", *more)


def test_random_order_validated(runs: NemoRuns) -> None:
    """Validation draws on where the one before it has ended, and draws the same again."""
    faults = Faults().kill(rank=3).at(step=3, mark="validation").hang(rank=1).at(step=6, mark="validation")
    faults.raises(rank=0).at(step=9, mark="validation").kill(rank=2).at(step=9, mark="batch_start")

    runs.check(faults, "--order", "cyclic")


@pytest.mark.parametrize("more", ORDERS, ids=lambda x: " ".join(x) or "dp4")
def test_the_callback_changes_no_order(runs: NemoRuns, more: tuple[str, ...]) -> None:
    """Without the callback the same samples are drawn, also where a pass is left before its end, or its order drawn ahead."""
    runs.check_plain("--order", "cyclic", *more)


@LAYOUTS
def test_the_callback_changes_nothing(runs: NemoRuns, layout: tuple[str, ...]) -> None:
    """Without the callback NeMo trains the same parameters, bit for bit."""
    runs.check_plain(*layout)
