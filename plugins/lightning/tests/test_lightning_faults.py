"""Faults in every part of a training: the run ends bit for bit as one without, and every line is logged once."""

import pytest
from light_harness import Runs

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


def test_ddp(runs: Runs) -> None:
    """24 steps of 3 epochs, validated twice in each: a fault in every part of them, and at the last batch."""
    faults = (
        Faults()
        .kill(rank=0).at(step=2, mark="training_step")
        .raises(rank=1).at(step=3, mark="in_backward")
        .kill(rank=2).at(step=4, mark="validation")
        .kill(rank=1).at(step=6, phase="body")
        .kill(rank=0).at(step=8, mark="epoch_end")
        .raises(rank=2).at(step=8, mark="epoch_start")
        .kill(rank=0).at(step=10, mark="optimizer_step")
        .raises(rank=0).at(step=11, mark="batch_end")
        .kill(rank=2).at(step=13, phase="prepared")
        .kill(rank=0).at(step=16, mark="batch_end")
        .kill(rank=1).at(step=19, phase="barrier")
        .hang(rank=2).at(step=21, mark="training_step")
        .kill(rank=0).at(step=24, mark="epoch_end")
    )  # fmt: skip
    ended = runs.check(faults)

    assert {"kill", "raise", "hang"} == {placed.kind for placed in ended.run.placed}


def test_set_up(runs: Runs) -> None:
    """A replacement dies in its set-up, and another at its first batch."""
    faults = (
        Faults().kill(rank=1).at(step=2, phase="backward").kill(rank=1, birth=1).at(phase="setup")
        .kill(rank=0).at(step=3, mark="batch_end").kill(rank=0, birth=1).at(step=3, mark="training_step")
    )  # fmt: skip
    runs.check(faults)


def test_manual_optimization(runs: Runs) -> None:
    """Two optimizers in one step: a step that is cut between them is taken back."""
    faults = (
        Faults().kill(rank=1).at(step=3, mark="between_optimizers").raises(rank=2).at(step=6, mark="between_optimizers")
        .kill(rank=0).at(step=8, mark="batch_end").kill(rank=2).at(step=10, phase="barrier").kill(rank=0).at(step=13, phase="body")
    )  # fmt: skip
    runs.check(faults, "--mode", "manual", "--epochs", "2")


def test_accumulation_scaler_and_a_schedule_that_follows_a_metric(runs: Runs) -> None:
    """And with processes that load the data."""
    faults = (
        Faults().kill(rank=1).at(step=1, mark="training_step").kill(rank=0).at(step=4, mark="epoch_end")
        .raises(rank=2).at(step=4, mark="epoch_start").kill(rank=2).at(step=6, mark="in_backward")
        .kill(rank=1).at(step=8, mark="epoch_start").kill(rank=0).at(step=9, phase="after")
    )  # fmt: skip
    runs.check(faults, "--mode", "plateau", "--accumulate", "2", "--scaled", "--workers", "1")


def test_fully_shard(runs: Runs) -> None:
    """FSDP2 on two by two ranks: each shard has a replica."""
    faults = (
        Faults().kill(rank=1).at(step=3, mark="training_step").raises(rank=2).at(step=5, mark="in_backward")
        .kill(rank=3).at(step=6, mark="validation").kill(rank=0).at(step=8, phase="body").kill(rank=2).at(step=12, mark="epoch_end")
    )  # fmt: skip
    runs.check(faults, "--mode", "fsdp", "--epochs", "1", ranks=4)


def test_all_ranks_lost(runs: Runs) -> None:
    """Nobody holds anything any more: the run goes on from a checkpoint of `state_replica`, and tells its steps once."""
    pytest.importorskip("safetensors")
    faults = Faults()
    for rank in range(3):
        faults.kill(rank=rank).at(step=20, mark="training_step")
    runs.check(faults, "--saved", scope="checkpoint")


def test_from_a_checkpoint_of_lightning(runs: Runs) -> None:
    """A run that goes on from what ModelCheckpoint saved at the end of an epoch, as at a restart of the whole job."""
    (saved,) = [path for path in runs.clean("--epochs", "2").saved if path.name == "epoch=1-step=16.ckpt"]
    faults = (
        Faults().kill(rank=0).at(step=0, mark="in_backward").kill(rank=1).at(step=4, mark="validation")
        .kill(rank=2).at(step=7, phase="body")
    )  # fmt: skip
    runs.check(faults, "--resume", str(saved))


def test_the_callback_changes_nothing(runs: Runs) -> None:
    """Without the callback Lightning trains the same parameters, bit for bit."""
    runs.check_plain()
