"""DTensors, as ``fully_shard`` and tensor parallelism make them: the part that is here, and the ranks that hold equal bytes of it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from instep.errors import UsageError


def sharded(tensor: Tensor) -> bool:
    """Whether some rank may hold another part of this tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds: a tensor on the same memory, or the tensor itself if it is whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def replicas(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks that hold the same part as this rank, ascending: those that differ only where the tensor is replicated.

    Raises:
        UsageError: the tensor waits for a reduction, or this rank is outside of its mesh.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    what = f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}"
    if coordinate is None:
        raise UsageError(f"{what} is on a mesh without this rank ({mesh}); protect what this rank holds a part of")
    if any(p.is_partial() for p in tensor.placements):
        raise UsageError(f"{what} is a sum that nobody has added up: redistribute it to Replicate() or Shard() before it is protected")
    where = tuple(slice(None) if p.is_replicate() else at for p, at in zip(tensor.placements, coordinate, strict=True))
    return tuple(sorted(int(rank) for rank in mesh.mesh[where].reshape(-1).tolist()))
