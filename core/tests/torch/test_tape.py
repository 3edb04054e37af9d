"""The tape of set-up results: replayed exactly, and any other sequence of calls is an error that names the call."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from instep.errors import UsageError
from instep.torch import tape
from instep.torch.tape import Tape, raw

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.uint8, torch.complex64)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test-tape")
    yield fd
    os.close(fd)


def results() -> list[list[Tensor]]:
    return [
        [torch.arange(6).reshape(2, 3).to(dtype)] for dtype in DTYPES
    ] + [[torch.tensor(3.5), torch.empty(0), torch.ones(4)[::2]], []]  # fmt: skip


def test_every_result_comes_back(file: int) -> None:
    first = Tape(file)
    for i, outputs in enumerate(results()):
        first.record("0", f"op{i}", outputs)
    second = Tape(file)
    for i, outputs in enumerate(results()):
        own = [torch.zeros_like(t) for t in outputs]
        second.replay("0", f"op{i}", own)
        for mine, theirs in zip(own, outputs, strict=True):
            assert torch.equal(mine, theirs)


def test_a_parameter_takes_its_replayed_value(file: int) -> None:
    Tape(file).record("0", "broadcast", [torch.ones(3)])
    parameter = torch.nn.Parameter(torch.zeros(3))
    Tape(file).replay("0", "broadcast", [parameter])
    assert parameter.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("label", "op", "shape", "says"),
    [
        ("0", "allreduce", (3,), "set-up collective 1"),
        ("0", "broadcast", (2,), "set-up collective 1"),
        ("1", "broadcast", (3,), "'1'"),
    ],
)
def test_another_call_is_named(file: int, label: str, op: str, shape: tuple[int, ...], says: str) -> None:
    first = Tape(file)
    first.record("0", "barrier", [])
    first.record("0", "broadcast", [torch.ones(3)])
    second = Tape(file)
    second.replay("0", "barrier", [])
    with pytest.raises(UsageError, match=says):
        second.replay(label, op, [torch.zeros(shape)])


def test_a_further_call_and_a_missing_call_are_named(file: int) -> None:
    first = Tape(file)
    first.record("0", "broadcast", [torch.ones(3)])
    second = Tape(file)
    with pytest.raises(UsageError, match="call 0, broadcast on '0'"):
        second.finish()
    second.replay("0", "broadcast", [torch.zeros(3)])
    second.finish()
    with pytest.raises(UsageError, match="call 1, allreduce on '2'"):
        second.replay("2", "allreduce", [torch.zeros(3)])


def test_beyond_the_limit_the_loopback_result_must_be_the_real_one(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "LIMIT", 16)
    first = Tape(file)
    first.record("0", "broadcast", [torch.ones(4)])
    first.record("0", "broadcast", [torch.ones(4)])
    first.record("0", "allreduce", [torch.full((4,), 2.0)])
    assert os.fstat(file).st_size < 400
    second = Tape(file)
    own = torch.zeros(4)
    second.replay("0", "broadcast", [own])
    assert own.tolist() == [1] * 4
    second.replay("0", "broadcast", [torch.ones(4)])
    with pytest.raises(UsageError, match=r"allreduce on '0' \(call 2\)"):
        second.replay("0", "allreduce", [torch.ones(4)])


def _sync_module_states(recorder: Tape, outputs: list[Tensor]) -> None:
    """Stands where torch's function of this name stands in the stack of DDP's constructor."""
    recorder.record("0", "broadcast", outputs)


def test_parameters_that_ddp_makes_equal_are_not_kept(file: int) -> None:
    _sync_module_states(Tape(file), [torch.ones(1000)])
    assert os.fstat(file).st_size < 400
    own = torch.full((1000,), 5.0)
    Tape(file).replay("0", "broadcast", [own])
    assert own[0] == 5


def test_a_second_replacement_replays_what_two_births_recorded(file: int) -> None:
    first = Tape(file)
    first.record("0", "a", [torch.ones(1)])
    second = Tape(file)
    second.replay("0", "a", [torch.zeros(1)])
    second.record("0", "b", [torch.full((1,), 2.0)])
    third, own = Tape(file), torch.zeros(1)
    third.replay("0", "a", [own])
    third.replay("0", "b", [own])
    third.finish()
    assert own.item() == 2


def test_raw_is_the_memory_of_a_tensor() -> None:
    assert bytes(raw(torch.tensor([1, 256], dtype=torch.int16))) == b"\x01\x00\x00\x01"
    assert bytes(raw(torch.empty(0, 3))) == b""
    assert bytes(raw(torch.arange(4, dtype=torch.uint8)[::2])) == b"\x00\x02"
