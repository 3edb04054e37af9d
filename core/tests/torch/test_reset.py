"""What a cut step leaves dirty in torch's own modes, and in works that nobody waits for any more."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from instep.torch import reset
from instep.torch.reset import Modes


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    before = Modes.capture()
    yield
    before.restore()


def test_modes_whose_end_was_cut_are_set_back() -> None:
    modes = Modes.capture()
    torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
    torch.set_autocast_enabled("cuda", True)
    torch.set_grad_enabled(False)
    assert Modes.capture() != modes
    reset.clean([], modes)
    assert Modes.capture() == modes
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_block_inside_autocast_goes_back_to_that() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        modes = Modes.capture()
        torch.autocast("cpu", enabled=False).__enter__()
        reset.clean([], modes)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16


def test_weights_cast_in_a_cut_step_are_not_used_again() -> None:
    """The cache of cast weights is cleared when the outermost autocast ends: one that never ended must not count."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    modes = Modes.capture()
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    model(x)
    reset.clean([model], modes)
    outputs = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(model(x).sum().item())
        with torch.no_grad():
            model.weight.add_(100)
    assert outputs[1] > outputs[0] + 100


def test_what_can_take_a_step_back_is_asked_to() -> None:
    class Counting:
        value = 5

        def undo_step(self) -> None:
            self.value = 3

    counting = Counting()
    reset.clean([counting], Modes.capture())
    assert counting.value == 3


def test_gradients_and_scaler_stages_are_dropped() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    reset.clean([model, optimizer, scaler], Modes.capture())
    assert model.weight.grad is None
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
