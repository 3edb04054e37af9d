"""Parameters that are DTensors, as ``fully_shard`` and tensor parallelism make them: which ranks hold equal shards, and their state.

A DTensor's placements decide: ranks that differ only in mesh dimensions on which it is replicated hold the same bytes. What an
optimizer keeps for a sharded parameter, its step counter too, belongs to the parameter's group.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from instep.errors import UsageError
from instep.torch.adapter import ShardGroup, Tree, name, tree
from instep.torch.overlay import branch
from instep.torch.protected import OptimizerState

_KEPT, _PLAIN = "shards", "plain"


def sharded(tensor: Tensor) -> bool:
    """Whether some rank may hold another part of this tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds: the same object at every call, whose memory is the tensor's own."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def replicas(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks that hold the same part as this rank, ascending.

    Raises:
        UsageError: the tensor waits for a reduction, or this rank is outside of its mesh.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or any(p.is_partial() for p in tensor.placements):
        raise UsageError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} has no part on this rank to protect"
        )
    where = tuple(slice(None) if p.is_replicate() else at for p, at in zip(tensor.placements, coordinate, strict=True))
    return tuple(sorted(int(rank) for rank in mesh.mesh[where].reshape(-1).tolist()))


class TensorShards:
    """One shard group of DTensors: the local parts by name, and what each optimizer keeps for them."""

    def __init__(self, ranks: tuple[int, ...], tensors: Mapping[str, DTensor], states: Mapping[str, OptimizerState]) -> None:
        self.replicas, self.name = ranks, name("shards", ranks)
        self._tensors, self._states = dict(tensors), dict(states)
        self._ids = {id(t) for t in tensors.values()}

    def tree(self) -> Tree:
        """See ``adapter.ShardGroup``."""
        kinds = {key: f"{tuple(t.shape)} as {t.placements} over {tuple(t.device_mesh.mesh.shape)}" for key, t in self._tensors.items()}
        objects = {key: [self._split(p, state.of(p)) for p in self._mine(state)] for key, state in self._states.items()}
        return tree(kinds=kinds, tensors={key: local(t) for key, t in self._tensors.items()}, objects=objects)

    def fit(self, theirs: Tree) -> Tree:  # noqa: ARG002 - nothing depends on it
        """Names, shapes and placements are compared by ``overlay``; the number of parameters by their names."""
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Own state takes exactly the donor's keys; parts become DTensors of the parameter's layout."""
        objects = branch(tree, "objects")
        for key, state in self._states.items():
            rows = objects[key]
            assert isinstance(rows, list)
            for p, row in zip(self._mine(state), rows, strict=True):
                state.put(p, None if row is None else {k: self._join(p, k, row) for k in row["order"]})

    def _mine(self, state: OptimizerState) -> list[DTensor]:
        return [p for p in state.parameters() if isinstance(p, DTensor) and id(p) in self._ids]

    @staticmethod
    def _split(p: DTensor, values: Mapping[str, object] | None) -> dict[str, object] | None:
        if values is None:
            return None
        parts = {k: local(v) for k, v in values.items() if isinstance(v, DTensor)}
        for k, v in values.items():
            if isinstance(v, DTensor) and (v.placements != p.placements or v.device_mesh != p.device_mesh):
                raise UsageError(
                    f"optimizer state {k!r} has placements {v.placements}, its parameter {p.placements}: it cannot be protected"
                )
        return {_KEPT: parts, _PLAIN: {k: v for k, v in values.items() if k not in parts}, "order": list(values)}

    @staticmethod
    def _join(p: DTensor, key: str, row: Mapping[str, Mapping[str, object]]) -> object:
        part = row[_KEPT].get(key)
        if not isinstance(part, Tensor):
            return row[_PLAIN][key]
        return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def groups(tensors: Mapping[str, Tensor], states: Mapping[str, OptimizerState], *, rank: int, world: Sequence[int]) -> list[ShardGroup]:
    """The shard groups of all DTensors among ``tensors``, by the lowest rank of each.

    Raises:
        UsageError: a DTensor lives on a mesh without this rank.
    """
    found: dict[tuple[int, ...], dict[str, DTensor]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            found.setdefault(replicas(tensor), {})[key] = tensor
    for ranks in found:
        if rank not in ranks or not set(ranks) <= set(world):
            raise UsageError(f"rank {rank} holds a part of a DTensor whose mesh says that it is on ranks {list(ranks)}")
    return [TensorShards(ranks, members, states) for ranks, members in sorted(found.items())]
