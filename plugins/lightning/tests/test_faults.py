"""Faults in every part of a training: the run ends bit for bit as one without, and every line is logged once."""

import pytest
from light_harness import Runs

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


def test_ddp(runs: Runs) -> None:
    """24 steps of 3 epochs, validated twice in each."""
    faults = (
        Faults()
        .kill(rank=0).at(step=2, mark="training_step")
        .raises(rank=1).at(step=3, mark="in_backward")
        .kill(rank=2).at(step=4, mark="validation")
        .kill(rank=1).at(step=6, phase="body")
        .kill(rank=0).at(step=8, mark="epoch_end")
        .raises(rank=2).at(step=8, mark="epoch_start")
        .kill(rank=0).at(step=10, phase="after")
        .raises(rank=0).at(step=11, mark="batch_end")
        .kill(rank=2).at(step=13, phase="prepared")
        .kill(rank=0).at(step=16, mark="batch_end")
        .kill(rank=1).at(step=19, phase="barrier")
        .hang(rank=2).at(step=21, mark="training_step")
        .kill(rank=0).at(step=24, mark="epoch_end")
    )  # fmt: skip
    runs.check(faults)
