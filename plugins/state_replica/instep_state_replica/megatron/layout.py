"""Which ranks hold equal copies of what, read off Megatron's own objects: parameters, optimizer shards, the schedule.

With the distributed optimizer the parameters in its buckets belong to no group: they follow from the shards, see ``Adapter.publish``.
"""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from instep.torch.adapter import ShardGroup
from instep_state_replica.megatron.foreign import Chunk, MegatronOptimizer, Part, distributed, parts
from instep_state_replica.megatron.groups import Parameters, Schedule, Shard

DENSE, EXPERT = "dense", "expert"


def groups(
    name: str, chunks: Sequence[Chunk], optimizer: MegatronOptimizer, scheduler: object, *, rank: int, world_size: int
) -> list[ShardGroup]:
    """All shard groups of this rank; ``name`` sets those of one adapter apart from those of another one."""
    out: list[ShardGroup] = []
    for kind in (DENSE, EXPERT):
        whole = _ranks(_replicas(chunks[0], kind))
        named = {f"{name}.{i}.{key}": p for i, chunk in enumerate(chunks) for key, p in _transferred(chunk, kind)}
        if named:
            out.append(Parameters(f"{name}.{kind}", whole, named))
        own = {f"{name}.optimizer.{i}": part for i, part in enumerate(parts(optimizer)) if _kind(part) == kind}
        if own:
            twins = _twins(chunks[0], rank) if any(map(distributed, own.values())) else whole
            out.append(Shard(f"{name}.{kind}-optimizer", twins, own, model=_model(name, chunks)))
    if scheduler is not None:
        out.append(Schedule(f"{name}.schedule", tuple(range(world_size)), scheduler))
    return out


def _transferred(chunk: Chunk, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that no optimizer shard leads to: all of them without the distributed optimizer, with it the frozen ones."""
    derived = set(chunk.param_to_bucket_group) if getattr(chunk.ddp_config, "use_distributed_optimizer", False) else set()
    for key, parameter in chunk.module.named_parameters():
        expert = not getattr(parameter, "allreduce", True)
        if parameter not in derived and expert == (kind == EXPERT):
            yield key, parameter


def _model(name: str, chunks: Sequence[Chunk]) -> dict[int, str]:
    return {id(p): f"{name}.{i}.{key}" for i, chunk in enumerate(chunks) for key, p in chunk.module.named_parameters()}


def _kind(part: Part) -> str:
    return EXPERT if any(group.get("is_expert_parallel") for group in part.optimizer.param_groups) else DENSE


def _replicas(chunk: Chunk, kind: str) -> ProcessGroup:
    """Data parallel ranks with context parallel ones, or those that hold the same experts."""
    return chunk.dp_cp_group if kind == DENSE else chunk.expt_dp_group


def _twins(chunk: Chunk, rank: int) -> tuple[int, ...]:
    """Ranks with the same shard: one in each instance of the distributed optimizer, for dense parameters and experts alike."""
    if getattr(chunk.ddp_config, "num_distributed_optimizer_instances", 1) == 1:
        return (rank,)
    group: ProcessGroup = chunk.inter_dist_opt_group  # type: ignore[attr-defined]  # there only with several instances
    return _ranks(group)


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
