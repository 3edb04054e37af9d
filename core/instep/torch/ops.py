"""The collectives of a process group: which tensors each one writes, and what it does alone (loopback)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Loop = Callable[[Sequence[object], int, int], None]
"""Runs an operation in loopback: its arguments, own rank in the group, size of the group."""


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _keep(args: Sequence[object], rank: int, size: int) -> None:
    """All-reduce, broadcast, reduce, barrier, send and receive leave the tensors alone."""


def _spread(args: Sequence[object], rank: int, size: int) -> None:
    own = list(tensors_in(args[1]))
    rows = args[0]
    if not isinstance(rows, list | tuple):
        raise TypeError(f"all_gather expects lists of tensors, got {type(rows).__name__}")
    for row, source in zip(rows, own, strict=False):
        for target in tensors_in(row):
            target.copy_(source)


def _spread_each(args: Sequence[object], rank: int, size: int) -> None:
    rows = args[0]
    if not isinstance(rows, list | tuple):
        raise TypeError(f"all_gather_coalesced expects lists of tensors, got {type(rows).__name__}")
    for row in rows:
        for target, source in zip(tensors_in(row), tensors_in(args[1]), strict=True):
            target.copy_(source)


def _spread_single(args: Sequence[object], rank: int, size: int) -> None:
    for target, source in zip(tensors_in(args[0]), tensors_in(args[1]), strict=True):
        target.view(size, -1).copy_(source.reshape(1, -1).expand(size, -1))


def _own_chunk(args: Sequence[object], rank: int, size: int) -> None:
    for target, source in zip(tensors_in(args[0]), tensors_in(args[1]), strict=True):
        target.copy_(source.reshape(size, -1)[rank].view_as(target))


def _own_row(args: Sequence[object], rank: int, size: int) -> None:
    rows = args[1]
    if not isinstance(rows, list | tuple):
        raise TypeError(f"expected lists of tensors, got {type(rows).__name__}")
    for target, row in zip(tensors_in(args[0]), rows, strict=False):
        target.copy_(list(tensors_in(row))[rank])


def _overlap(args: Sequence[object], rank: int, size: int) -> None:
    target, source = next(tensors_in(args[0])).view(-1), next(tensors_in(args[1])).view(-1)
    count = min(target.numel(), source.numel())
    target[:count].copy_(source[:count])


def _pairwise(args: Sequence[object], rank: int, size: int) -> None:
    for target, source in zip(tensors_in(args[0]), tensors_in(args[1]), strict=False):
        if target.shape == source.shape:
            target.copy_(source)


def _collect(args: Sequence[object], rank: int, size: int) -> None:
    for target in tensors_in(args[0]):
        target.copy_(next(tensors_in(args[1])))


@dataclass(frozen=True)
class Op:
    """One operation: ``output`` is the argument it writes, ``sliced`` whether a wait on its work may time out harmlessly."""

    name: str
    loop: Loop = _keep
    output: int | None = 0
    sliced: bool = True

    def outputs(self, args: Sequence[object]) -> list[Tensor]:
        """The tensors that the operation writes."""
        if self.output is None or len(args) <= self.output:
            return []
        value = args[self.output]
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Tensor):
            return [value[0]]  # most of them
        return list(tensors_in(value))


_ALL = (
    Op("allreduce"),
    Op("allreduce_coalesced"),
    Op("broadcast"),
    Op("reduce"),
    Op("allgather", _spread),
    Op("allgather_coalesced", _spread_each),
    Op("_allgather_base", _spread_single),
    Op("all_gather_single", _spread_single),
    Op("allgather_into_tensor_coalesced", _spread_single),
    Op("all_gather_single_coalesced", _spread_single),
    Op("gather", _collect),
    Op("scatter", _own_row),
    Op("reduce_scatter", _own_row),
    Op("_reduce_scatter_base", _own_chunk, sliced=False),
    Op("reduce_scatter_single", _own_chunk, sliced=False),
    Op("reduce_scatter_tensor_coalesced", _own_chunk, sliced=False),
    Op("reduce_scatter_single_coalesced", _own_chunk, sliced=False),
    Op("alltoall_base", _overlap),
    Op("all_to_all_single", _overlap),
    Op("alltoall", _pairwise),
    # A wait on point-to-point that times out closes every pair of the group (gloo unbound_buffer.cc).
    Op("send", output=None, sliced=False),
    Op("recv", sliced=False),
    Op("recv_anysource", sliced=False),
    Op("barrier", output=None),
    Op("monitored_barrier", output=None),
)
MESSAGES = frozenset({"send", "recv", "recv_anysource"})
"""Operations that may wait for another one of the same rank, issued later."""
OPS: Mapping[str, Op] = {op.name: op for op in _ALL if hasattr(torch.distributed.ProcessGroup, op.name)}
"""Every operation that this torch knows, by method name."""
