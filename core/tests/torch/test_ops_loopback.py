"""What each collective of a handle does in loopback: as if every member had given what this rank gives, or nothing at all."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from instep.agent import records
from instep.agent.records import Header
from instep.board import Board
from instep.errors import CommsError, UsageError
from instep.model import Group
from instep.torch.gate import Gate
from instep.torch.handle import Handle
from instep.torch.ops import OPS
from instep.torch.tape import Tape

SIZES = (2, 3, 4)


@pytest.fixture
def gate() -> Iterator[Gate]:
    header, setup = records.create("test-header"), os.memfd_create("test-setup")
    made = Gate(Board(), Header(header), Tape(setup), loopback=True)
    made.tape.replay = lambda label, op, outputs: None  # type: ignore[method-assign]
    yield made
    os.close(header)
    os.close(setup)


def handle(gate: Gate, size: int) -> Handle:
    """The handle of the last rank of a group."""
    return Handle(gate, Group(name="7", ranks=tuple(range(size)), backend="gloo"), size - 1)


def own(size: int = 3) -> Tensor:
    return torch.arange(1.0, size + 1)


def rows(size: int, *, start: float = 0.0) -> list[Tensor]:
    return [torch.full((2,), start + i) for i in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "reduce", "allreduce_coalesced"])
def test_reductions_and_broadcasts_keep_what_is_there(gate: Gate, name: str, size: int) -> None:
    tensors = [own(), own(2)]
    work = getattr(handle(gate, size), name)(tensors)
    assert work.wait()
    assert work.is_completed()
    assert [t.tolist() for t in tensors] == [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize("size", SIZES)
def test_gathers_hold_the_own_part_everywhere(gate: Gate, size: int) -> None:
    group = handle(gate, size)
    group.allgather([out := [torch.zeros(3) for _ in range(size)]], [own()]).wait()
    assert [t.tolist() for t in out] == [[1, 2, 3]] * size
    coalesced = [[torch.zeros(3), torch.zeros(2)] for _ in range(size)]
    group.allgather_coalesced(coalesced, [own(3), own(2)]).wait()
    assert [[t.tolist() for t in row] for row in coalesced] == [[[1, 2, 3], [1, 2]]] * size
    for name in ("_allgather_base", "all_gather_single"):
        if name in OPS:
            getattr(group, name)(single := torch.zeros(size * 3), own()).wait()
            assert single.tolist() == [1, 2, 3] * size
            getattr(group, name)(square := torch.zeros(size * 2, 3), own(6).reshape(2, 3)).wait()
            assert square.tolist() == [[1, 2, 3], [4, 5, 6]] * size
    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        if name in OPS:
            several = [torch.zeros(size * 3), torch.zeros(size * 2)]
            getattr(group, name)(several, [own(3), own(2)]).wait()
            assert [t.tolist() for t in several] == [[1, 2, 3] * size, [1, 2] * size]
    group.gather([collected := [torch.zeros(3) for _ in range(size)]], [own()], dist.GatherOptions()).wait()
    assert [t.tolist() for t in collected] == [[1, 2, 3]] * size
    group.gather([], [own()], dist.GatherOptions()).wait()


@pytest.mark.parametrize("size", SIZES)
def test_scatters_take_the_own_part(gate: Gate, size: int) -> None:
    group = handle(gate, size)
    group.reduce_scatter([out := torch.zeros(2)], [rows(size)]).wait()
    assert out.tolist() == [size - 1.0] * 2
    group.scatter([out], [rows(size, start=10)], dist.ScatterOptions()).wait()
    assert out.tolist() == [9.0 + size] * 2
    group.scatter([kept := own()], [], dist.ScatterOptions()).wait()
    assert kept.tolist() == [1, 2, 3]
    whole = torch.cat(rows(size))
    for name in ("_reduce_scatter_base", "reduce_scatter_single"):
        if name in OPS:
            getattr(group, name)(out.zero_(), whole).wait()
            assert out.tolist() == [size - 1.0] * 2
    for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        if name in OPS:
            several = [torch.zeros(2), torch.zeros(1)]
            getattr(group, name)(several, [whole, torch.arange(float(size))]).wait()
            assert [t.tolist() for t in several] == [[size - 1.0] * 2, [size - 1.0]]


@pytest.mark.parametrize("size", SIZES)
def test_exchanges_and_messages(gate: Gate, size: int) -> None:
    group = handle(gate, size)
    for name in ("alltoall_base", "all_to_all_single"):
        if name in OPS:
            getattr(group, name)(out := torch.zeros(size), torch.arange(float(size)), [], []).wait()
            assert out.tolist() == list(range(size))
    group.alltoall(outs := [torch.zeros(2) for _ in range(size)], rows(size)).wait()
    assert [t.tolist() for t in outs] == [[float(i)] * 2 for i in range(size)]
    group.send([own()], 0, 0).wait()
    group.recv([kept := own()], 0, 0).wait()
    group.recv_anysource([kept], 0).wait()
    group.barrier().wait()
    assert kept.tolist() == [1, 2, 3]


def test_futures_of_loopback_hold_the_outputs(gate: Gate) -> None:
    tensor = own()
    future = handle(gate, 3).allreduce([tensor]).get_future()
    assert future.wait()[0] is tensor


def test_every_collective_of_this_torch_is_overridden() -> None:
    """What a handle does not override runs in no communicator: torch would answer that the group has no backend."""
    known = {"abort", "shutdown", "rank", "size", "name", "boxed", "unbox", "set_timeout", "split_group", "merge_remote_group"}
    calls = {
        name
        for name in vars(dist.ProcessGroup)
        if any(word in name for word in ("reduce", "gather", "broadcast", "scatter", "alltoall", "all_to_all", "send", "recv", "barrier"))
    }
    assert calls - known <= set(OPS), f"not served by handles: {sorted(calls - known - set(OPS))}"
    assert set(OPS) <= calls


def test_a_group_of_one_needs_no_communicator(gate: Gate) -> None:
    gate.loopback = False
    group = Handle(gate, Group(name="1", ranks=(5,), backend="gloo"), 0)
    group.allgather([out := [torch.zeros(3)]], [own()]).wait()
    assert out[0].tolist() == [1, 2, 3]


def test_nothing_may_be_issued_inside_a_commit_body(gate: Gate) -> None:
    group = handle(gate, 1)
    gate.body = True
    with pytest.raises(UsageError, match=r"allreduce on process group '7' inside a commit body"):
        group.allreduce([own()])


def test_a_group_that_cannot_be_connected_leaves_nothing_behind(gate: Gate) -> None:
    gate.loopback = False
    with pytest.raises(CommsError, match="before the job is joined"):
        handle(gate, 2)
    assert gate.handles == []
