"""What this adapter uses of megatron-core's objects, which carry no types of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

Result = tuple[bool, float | None, int | None]
"""What ``optimizer.step()`` returns: whether it updated, the gradient norm, the number of zeros."""


class BucketGroup(Protocol):
    """Buckets whose gradients are reduced, and parameters gathered, by one collective."""

    grad_reduce_handle: object | None
    param_gather_handle: object | None
    param_gather_dispatched: bool
    per_param_grad_ready_counts: dict[Tensor, int]
    golden_per_param_grad_ready_counts: dict[Tensor, int]
    is_first_batch: bool
    is_last_microbatch: bool


class Chunk(Protocol):
    """A model chunk in Megatron's DistributedDataParallel."""

    config: object
    ddp_config: object
    module: nn.Module
    param_to_bucket_group: dict[nn.Parameter, BucketGroup]
    bucket_groups: Sequence[BucketGroup]
    expert_parallel_bucket_groups: Sequence[BucketGroup]
    dp_cp_group: ProcessGroup
    expt_dp_group: ProcessGroup

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, and what buckets know of them."""

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather the parameters whose shards were updated."""


class Scaler(Protocol):
    """A loss scale that follows overflows."""

    def state_dict(self) -> dict[str, object]:
        """Scale and trackers."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take them over."""


class Part(Protocol):
    """One of the optimizers that a chained one consists of: dense parameters, or those of experts."""

    config: object
    optimizer: Optimizer
    is_stub_optimizer: bool
    grad_scaler: Scaler | None
    zero_grad: Callable[[], None]
    _copy_main_params_to_model_params: Callable[[], None]


class MegatronOptimizer(Protocol):
    """What ``get_megatron_optimizer`` returns."""

    config: object
    step: Callable[[], Result]
    step_with_ready_grads: Callable[[], bool]
    zero_grad: Callable[[], None]


def distributed(part: Part) -> bool:
    """Whether this optimizer owns a shard of each parameter, and gathers them after its update."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer)


def parts(optimizer: MegatronOptimizer) -> list[Part]:
    """The optimizers of a chained one, or the only one; without those that have no parameters at all."""
    every: Sequence[Part] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


_PAIRS = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
"""Attributes of mixed precision optimizers: parameters of the model by group, and what is stepped in their place."""


def stepped(part: Part, model: Mapping[int, str]) -> dict[int, str]:
    """Names of what an optimizer steps, by ``id``: a parameter of the model, its fp32 copy, or the shard of either."""
    out = dict(model)
    for theirs, own in _PAIRS:
        for parameters, copies in zip(getattr(part, theirs, ()), getattr(part, own, ()), strict=True):
            out.update((id(copy), model[id(p)]) for p, copy in zip(parameters, copies, strict=True) if copy is not None)
    return out


def bucket_groups(chunk: Chunk) -> list[BucketGroup]:
    """All bucket groups of a chunk."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


@torch.no_grad()
def update(part: Part) -> bool:
    """The local part of an optimizer's step: the update, and the copy to the model's parameters, but no gather."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    if distributed(part):
        return bool(MixedPrecisionOptimizer.step_with_ready_grads(part))
    return bool(type(part).step_with_ready_grads(part))  # type: ignore[attr-defined]
