"""Several loaders at once, in every way in which Lightning combines them, and loggers that take no line twice."""

import pytest
from light_harness import Runs

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


@pytest.mark.parametrize(
    ("mode", "epoch"),
    [("max_size_cycle", 8), *(pytest.param(*case, marks=pytest.mark.full) for case in (("min_size", 5), ("max_size", 8)))],
)
def test_loaders_and_loggers(mode: str, epoch: int, varied: Runs) -> None:
    """A server's logger refuses a step that is behind, a version of TensorBoard is gone on with, a CSV file is not begun anew."""
    faults = (
        Faults()
        .kill(rank=0).at(step=2, mark="training_step").kill(rank=1).at(step=3, mark="validation1")
        .raises(rank=0).at(step=4, mark="in_backward")
        .kill(rank=2).at(step=6, mark="training_step").kill(rank=0).at(step=7, phase="body")
        .raises(rank=2).at(step=epoch + 3, mark="validation0")
    )  # fmt: skip
    ended = varied.check(faults, "--mode", mode)

    assert ended.finals[0]["counters"][0] == 2 * epoch  # type: ignore[index]
    board = [(tag, step) for tag, step, _ in ended.finals[0]["board"] if tag != "epoch"]  # type: ignore[attr-defined]
    assert ended.finals[0]["boards"] == 1
    assert len(set(board)) == len(board)
    assert [step for tag, step in board if tag == "loss_step"] == list(range(2 * epoch))


@pytest.mark.full
def test_the_callback_changes_nothing(varied: Runs) -> None:
    varied.check_plain()
