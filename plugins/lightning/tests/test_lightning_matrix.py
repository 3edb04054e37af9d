"""Every part of a training, with every kind of fault, under each strategy: what the tests of every day take samples of."""

import pytest
from light_harness import Runs

from instep.testing.faults import Faults, Kind

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]
STRATEGIES = {"ddp": ("automatic", 3, 8), "hsdp": ("fsdp", 4, 12), "buddies": ("buddies", 4, 6)}
"""The job's mode, its ranks, and how many steps its epochs have."""
Part = tuple[int, int, str]


def parts(epoch: int) -> list[Part]:
    """Rank, step and mark. Two epochs with two validations each; the last batch is the last one of the first epoch."""
    return [
        (0, 1, "training_step"), (1, 2, "in_backward"), (2, epoch // 2, "validation"), (0, epoch // 2 + 1, "barrier"),
        (1, epoch // 2 + 2, "body"), (2, epoch - 1, "training_step"), (0, epoch, "batch_end"), (1, epoch, "epoch_end"),
        (2, epoch, "epoch_start"), (0, epoch + 2, "optimizer_step"), (1, 2 * epoch, "validation"), (2, 2 * epoch, "epoch_end"),
    ]  # fmt: skip


def parts_apart(epoch: int) -> list[Part]:
    """The same in four epochs: a copy on a buddy is made anew before the next fault."""
    return [
        (0, 1, "training_step"), (2, epoch // 2, "validation"), (2, epoch - 1, "training_step"), (1, epoch + 2, "in_backward"),
        (0, epoch + 4, "barrier"), (1, 2 * epoch, "epoch_end"), (2, 2 * epoch + 2, "body"), (3, 3 * epoch - 2, "batch_end"),
        (0, 3 * epoch, "epoch_start"), (1, 3 * epoch + 2, "optimizer_step"), (2, 4 * epoch, "epoch_end"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["kill", "raise", "hang"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_part(strategy: str, kind: Kind, runs: Runs) -> None:
    mode, ranks, epoch = STRATEGIES[strategy]
    faults = Faults()
    for rank, step, name in parts_apart(epoch) if mode == "buddies" else parts(epoch):
        if (kind, name) != ("raise", "body"):  # a body that raises is an error of the script, and no accident
            placing = {"kill": faults.kill, "raise": faults.raises, "hang": faults.hang}[kind](rank=rank)
            placing.at(step=step, **{"phase" if name in ("barrier", "body") else "mark": name})
    ended = runs.check(faults, "--mode", mode, "--epochs", "4" if mode == "buddies" else "2", ranks=ranks)

    assert {placed.kind for placed in ended.run.placed} == {kind}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_set_up(strategy: str, runs: Runs) -> None:
    """A replacement dies in its set-up, the next one when it connects, another while it is given its state."""
    mode, ranks, _ = STRATEGIES[strategy]
    faults = (
        Faults().kill(rank=1).at(step=1, phase="backward").kill(rank=1, birth=1).at(phase="setup").kill(rank=1, birth=2).at(phase="connect")
        .kill(rank=0).at(step=3, phase="step").kill(rank=0, birth=1).at(phase="restore")
    )  # fmt: skip
    runs.check(faults, "--mode", mode, "--epochs", "1", ranks=ranks)


@pytest.mark.parametrize(
    "shape",
    [
        ("--precision", "bf16-mixed"), ("--precision", "bf16-true"), ("--precision", "64-true"), ("--scaled",), ("--accumulate", "4"),
        ("--mode", "plateau"), ("--mode", "manual"), ("--mode", "manual", "--accumulate", "2"), ("--mode", "fsdp", "--accumulate", "2"),
        ("--mode", "fsdp", "--precision", "bf16-true"), ("--mode", "fsdp", "--whole"), ("--workers", "2"), ("--stateful",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_shape(shape: tuple[str, ...], runs: Runs) -> None:
    """Each way to train, with one fault of each kind."""
    faults = (
        Faults().kill(rank=0).at(step=1, mark="training_step").raises(rank=1).at(step=1, mark="in_backward")
        .hang(rank=2).at(step=2, mark="training_step").kill(rank=1).at(step=3, phase="barrier").kill(rank=2).at(step=3, mark="batch_end")
    )  # fmt: skip
    runs.check(faults, *shape, "--epochs", "2", ranks=4 if "fsdp" in shape else 3)
