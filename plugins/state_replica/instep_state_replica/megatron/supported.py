"""What this adapter can recover, and what it refuses: each time with the reason, and what to use instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from instep.errors import UsageError

RANGE = ((0, 15, 3), (0, 17, 0))
"""Versions of megatron-core from which and below which its internals were read and recoveries were tried."""
_ADAPTER = "instep_state_replica.megatron.Megatron"
_FUSED = frozenset({"FusedAdam", "FusedSGD"})


@dataclass(frozen=True)
class Refused:
    """A setting that is refused when it is set to anything but ``off``."""

    setting: str
    why: str
    instead: str
    off: object = False


REFUSED = (
    Refused(
        "use_megatron_fsdp", "Megatron-FSDP keeps its shards in buffers of its own", "use_distributed_optimizer, or torch's fully_shard"
    ),
    Refused(
        "overlap_param_gather_with_optimizer_step",
        "it gathers parameters in the middle of the update, so that a cut leaves some ranks with half of a step that nobody can finish",
        "overlap_param_gather, which hides as much",
    ),
    Refused(
        "fp8_param_gather", "fp8 parameters are quantised by a collective in the middle of the update", "fp8 compute with bf16 parameters"
    ),
    Refused(
        "use_precision_aware_optimizer",
        "it keeps the main parameters inside of the fused optimizer, where parameters cannot be derived from",
        "use_precision_aware_optimizer=False",
    ),
    Refused("optimizer_cpu_offload", "its optimizer consists of several that no other rank can take over", "optimizer_cpu_offload=False"),
    Refused("nccl_ub", "it registers buffers with communicators that a recovery replaces", "nccl_ub=False"),
    Refused("enable_cuda_graph", "a captured graph keeps the communicators that a recovery replaces", "enable_cuda_graph=False"),
    Refused("cuda_graph_impl", "a captured graph keeps the communicators that a recovery replaces", "cuda_graph_impl='none'", off="none"),
)
"""Looked up in the configurations of chunks, of their DistributedDataParallel and of the optimizer."""


def check(chunks: Sequence[object], optimizer: object) -> None:
    """Refuse what cannot be recovered.

    Raises:
        UsageError: megatron-core is missing or of another version, or something about model or optimizer is not supported.
    """
    _version()
    from megatron.core.distributed import DistributedDataParallel

    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            raise UsageError(
                f"{_ADAPTER}: chunk {index} is a {_type(chunk)}; it takes the chunks as wrapped in megatron.core.distributed."
                f"DistributedDataParallel. {_other(chunk)}"
            )
        _settings(f"chunk {index}", chunk.ddp_config, chunk.config)
    _optimizer(optimizer)


def _version() -> None:
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise UsageError(f"{_ADAPTER} needs megatron-core: pip install 'instep-state-replica[megatron]'") from None
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in found.split(".")[:3])
    low, high = RANGE
    if not low <= numbers < high:
        raise UsageError(
            f"{_ADAPTER} knows megatron-core from {_dotted(low)} to below {_dotted(high)}, this is {found}: a recovery resets its "
            "internals, and those of other versions may differ. Install one of them, or a newer instep-state-replica"
        )


def _settings(where: str, *configs: object) -> None:
    for refused in REFUSED:
        for config in configs:
            value = getattr(config, refused.setting, refused.off)
            if value not in (refused.off, None):
                raise UsageError(
                    f"{_ADAPTER}: {where} has {refused.setting}={value!r}, which cannot be recovered: {refused.why}. "
                    f"Use {refused.instead} instead"
                )


def _optimizer(optimizer: object) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if type(optimizer) is not ChainedOptimizer and not isinstance(optimizer, known):
        raise UsageError(f"{_ADAPTER}: the optimizer is a {_type(optimizer)}; it takes what get_megatron_optimizer() returns")
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part, known):
            raise UsageError(
                f"{_ADAPTER}: one of the chained optimizers is a {_type(part)}, which it does not know how to split into shards"
            )
        _settings("the optimizer", part.config)
        inner = part.optimizer
        if inner is not None and not _elementwise(inner):
            raise UsageError(
                f"{_ADAPTER}: the optimizer's update is done by {_type(inner)}, which may talk to other ranks in the middle of it; "
                "Adam, AdamW and SGD (torch's, or fused ones) update each element for itself and can be recovered"
            )


def _elementwise(optimizer: Optimizer) -> bool:
    return type(optimizer) in (Adam, AdamW, SGD) or type(optimizer).__name__ in _FUSED


def _other(chunk: object) -> str:
    name = type(chunk).__name__
    if "FullyShardedDataParallel" in name and not name.startswith("Torch"):
        return "Megatron-FSDP keeps its shards in buffers of its own: use the distributed optimizer, or torch's fully_shard, instead"
    if name.startswith("TorchFullySharded"):
        return "Torch's FSDP2 needs no adapter: session.protect(model=..., optimizer=...)"
    return "A bare module needs none: session.protect(model=..., optimizer=...)" if isinstance(chunk, nn.Module) else ""


def _type(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
