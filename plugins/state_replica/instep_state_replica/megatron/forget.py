"""What a step that was cut leaves behind in Megatron's objects, and is forgotten before the step is done again."""

import sys
from collections.abc import Sequence

from instep_state_replica.megatron.foreign import Chunk, MegatronOptimizer, bucket_groups


def forget(chunks: Sequence[Chunk], optimizer: MegatronOptimizer) -> None:
    """Drop gradients, handles of collectives that were in flight, and marks of what was under way. Local; may be repeated."""
    for chunk in chunks:
        for group in bucket_groups(chunk):
            # A stale handle would be waited for: a forced gather then returns without gathering.
            group.grad_reduce_handle = group.param_gather_handle = None
            group.param_gather_dispatched = False
            # All ranks learn the order of gradients anew, as the replacement has to.
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}
            group.per_param_grad_ready_counts = {}
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    _checkpointing()
    _losses_of_experts()
    for holder in (optimizer, *chunks):
        _timers(getattr(getattr(holder, "config", None), "timers", None))


def _checkpointing() -> None:
    """Recomputation of activations marks itself in a module's variable."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if hasattr(module, "IS_CHECKPOINTING"):
        module.IS_CHECKPOINTING = False  # type: ignore[union-attr]


def _losses_of_experts() -> None:
    """Auxiliary losses are summed up for the log; those of the cut step would count twice."""
    module = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if module is not None:
        module.clear_aux_losses_tracker()


def _timers(timers: object) -> None:
    """A timer that runs refuses to be started."""
    for timer in getattr(timers, "_timers", {}).values():
        timer._started = False
