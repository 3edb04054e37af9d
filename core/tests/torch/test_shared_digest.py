import pytest
import torch
from torch import nn

from instep.torch.digest import CHUNK, digest, memory
from instep.torch.shared import Shared


def test_equal_bytes_in_equal_order_give_equal_digests() -> None:
    a, b = torch.arange(3 * CHUNK), torch.ones(3)
    assert digest([a, b]) == digest([a.clone(), b.clone()])
    assert digest([a, b]) != digest([b, a])
    assert digest([a]) != digest([a, torch.empty(0)])
    assert digest([torch.ones(2), torch.ones(1)]) != digest([torch.ones(1), torch.ones(2)])


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 4])
def test_every_bit_counts(at: int) -> None:
    tensor = torch.zeros(2 * CHUNK + 5, dtype=torch.uint8)
    before = digest([tensor])
    tensor[at] ^= 1
    assert digest([tensor]) != before


def test_exchanged_chunks_are_seen() -> None:
    tensor = torch.arange(2 * CHUNK, dtype=torch.int32)
    assert digest([tensor]) != digest([tensor.reshape(-1, CHUNK // 4).flip(0).reshape(-1)])


def test_layout_in_memory_does_not_count() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest([tensor.t()]) == digest([tensor.t().contiguous()]) != digest([tensor])


def test_memory_is_the_tensors_own() -> None:
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bool), torch.nn.Parameter(torch.zeros(3))):
        memory(tensor)[0] = 1
        assert tensor.detach().reshape(-1).view(torch.uint8)[0] == 1
    with pytest.raises(ValueError, match="contiguous"):
        memory(torch.zeros(2, 3).t())


def test_a_digest_ahead_serves_once_and_not_past_a_change() -> None:
    model = nn.Linear(3, 3)
    state = Shared()
    state.add("model", model)
    state.check_coverage()
    fresh = state.world.digest()

    state.world.digest_ahead(bool)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert state.world.digest() == fresh  # nothing may change in between: it was computed before
    changed = state.world.digest()
    assert changed != fresh

    for change in (state.commit, lambda: receive(state)):
        state.world.digest_ahead(bool)
        with torch.no_grad():
            model.weight.sub_(1.0)
        change()
        assert state.world.digest() != changed
        changed = state.world.digest()


def test_a_digest_ahead_that_is_stopped_counts_for_nothing() -> None:
    model = nn.Linear(3, 3)
    state = Shared()
    state.add("model", model)
    state.check_coverage()
    state.world.digest_ahead(bool)
    with torch.no_grad():
        model.weight.add_(1.0)

    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        state.world.digest_ahead(stop)
    other = Shared()
    other.add("model", model)
    other.check_coverage()
    assert state.world.digest() == other.world.digest()


def receive(state: Shared) -> None:
    schema, _ = state.world.describe()
    state.world.destination(schema, staged=False)
    state.world.accept()
