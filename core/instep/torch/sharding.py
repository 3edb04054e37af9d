"""Shard groups of parameters that are DTensors, by their placements: parameters, and what optimizers keep for them.

What an optimizer keeps for a sharded parameter, its step counter too, belongs to the parameter's group. One-dimensional sharding leaves
each rank alone with its part: such a group has one replica.
"""

import operator
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from instep.errors import UsageError
from instep.torch.adapter import ShardGroup, Tree, tree
from instep.torch.dtensor import local, replicas
from instep.torch.overlay import branch
from instep.torch.protected import OptimizerState

_PARTS, _PLAIN, _LAYOUTS, _ORDER = "shards", "plain", "layouts", "order"
_STEADY = (Tensor, str, int, float, type(None))
"""Types of values that are others when they have changed; tensors are looked at where they are."""
_LISTED = 8
"""Replicas that a group's name lists; more are told apart by a checksum."""


def name(ranks: Sequence[int]) -> str:
    """The name of the group on these ranks. Groups of two meshes may share their lowest rank and no other."""
    listed = ",".join(map(str, ranks[:_LISTED]))
    return f"shards@{listed}" + (f"...{ranks[-1]}#{zlib.crc32(repr(tuple(ranks)).encode()):08x}" if len(ranks) > _LISTED else "")


class TensorShards:
    """One shard group of DTensors: the local parts by name, and what each optimizer keeps for them."""

    def __init__(self, ranks: tuple[int, ...], tensors: Mapping[str, DTensor], states: Mapping[str, OptimizerState]) -> None:
        self.replicas, self.name = ranks, name(ranks)
        self._tensors, self._states = dict(tensors), dict(states)
        self._names = {id(t): key for key, t in tensors.items()}
        self._kinds = {key: f"{tuple(t.shape)} as {t.placements} over {tuple(t.device_mesh.mesh.shape)}" for key, t in tensors.items()}
        self._made: Tree | None = None
        self._from: tuple[list[object], list[int]] = [], []

    @torch.no_grad()  # once for all parts
    def tree(self) -> Tree:
        """See ``adapter.ShardGroup``. The same object again while nothing but the bytes of its tensors may have changed.

        It is asked for at every commit when copies are kept.
        """
        objects, places = self._source()
        before, lay = self._from
        same = places == lay and len(objects) == len(before) and all(map(operator.is_, objects, before))
        if self._made is None or not same:
            kept = {key: [self._split(p, state.of(p)) for p in self._mine(state)] for key, state in self._states.items()}
            self._made = tree(kinds=self._kinds, tensors={key: local(t) for key, t in self._tensors.items()}, objects=kept)
            self._from = objects, places
        return self._made

    def _source(self) -> tuple[list[object], list[int]]:
        """All that the tree is made from, and the addresses of the parts of DTensors; something new where a value may change in place."""
        objects: list[object] = [*self._tensors.values()]
        for state in self._states.values():
            for p in self._mine(state):
                values = state.of(p)
                objects.extend((p, None) if values is None else (p, *values, *values.values()))
        parts = [o._local_tensor for o in objects if isinstance(o, DTensor)]
        steady = all(issubclass(kind, _STEADY) for kind in set(map(type, objects)))
        return [*objects, *parts, None if steady else object()], [part.data_ptr() for part in parts]

    def fit(self, theirs: Tree) -> Tree:  # noqa: ARG002 - nothing depends on it
        """Names, shapes and placements are compared by ``overlay``; the number of parameters by their names."""
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Own state takes exactly the donor's keys; parts become DTensors again, of the layout that the donor tells."""
        objects = branch(tree, "objects")
        for key, state in self._states.items():
            rows = objects[key]
            assert isinstance(rows, list)
            for p, row in zip(self._mine(state), rows, strict=True):
                state.put(p, None if row is None else {k: self._join(p, k, row) for k in row[_ORDER]})

    def _mine(self, state: OptimizerState) -> list[DTensor]:
        return [p for p in state.parameters() if isinstance(p, DTensor) and id(p) in self._names]

    def _split(self, p: DTensor, values: Mapping[str, object] | None) -> dict[str, object] | None:
        """State as tensors without a mesh. Only two layouts are told: the parameter's own, and whole on each rank of its mesh."""
        if values is None:
            return None
        parts = {k: v for k, v in values.items() if isinstance(v, DTensor)}
        for k, v in parts.items():
            if v.device_mesh != p.device_mesh or not (v.placements == p.placements or _whole(v)):
                raise UsageError(
                    f"{self._names[id(p)]}: the optimizer keeps {k!r} with placements {v.placements} for a parameter with {p.placements}: "
                    "such state cannot be restored; use an optimizer whose state lies as its parameters do"
                )
        return {
            _PARTS: {k: local(v) for k, v in parts.items()},
            _LAYOUTS: {k: [v.placements == p.placements, list(v.shape), list(v.stride())] for k, v in parts.items()},
            _PLAIN: {k: v for k, v in values.items() if k not in parts},
            _ORDER: list(values),
        }

    @staticmethod
    def _join(p: DTensor, key: str, row: Mapping[str, Mapping[str, object]]) -> object:
        part = row[_PARTS].get(key)
        if not isinstance(part, Tensor):
            return row[_PLAIN][key]
        layout = row[_LAYOUTS][key]
        assert isinstance(layout, list)
        alike, shape, stride = layout
        placements = p.placements if alike else (Replicate(),) * p.device_mesh.ndim
        return DTensor.from_local(part, p.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _whole(tensor: DTensor) -> bool:
    return all(p.is_replicate() for p in tensor.placements)


def groups(tensors: Mapping[str, Tensor], states: Mapping[str, OptimizerState], *, rank: int, world: Sequence[int]) -> list[ShardGroup]:
    """The shard groups of all DTensors among ``tensors``, in the order of their ranks.

    Raises:
        UsageError: a DTensor is a partial sum, or lives on a mesh without this rank.
    """
    found: dict[tuple[int, ...], dict[str, DTensor]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            try:
                found.setdefault(replicas(tensor), {})[key] = tensor
            except UsageError as error:
                raise UsageError(f"{key}: {error}") from None
    for ranks in found:
        if rank not in ranks or not set(ranks) <= set(world):
            raise UsageError(f"rank {rank} holds a part of a DTensor whose mesh says that it is on ranks {list(ranks)}")
    return [TensorShards(ranks, members, states) for ranks, members in sorted(found.items())]
