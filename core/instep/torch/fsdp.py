"""What an interrupted step leaves in modules of ``fully_shard``: gathered parameters, gradients under way, notes of the iteration."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reset(module: nn.Module) -> None:
    """Bring every root that ``fully_shard`` made inside a module back to where an iteration starts: parameters are sharded again.

    Works that were cut are dropped, not waited for.
    """
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        if state._is_root is False:
            continue
        for each in state._state_ctx.all_states or [state]:
            for group in each._fsdp_param_groups:
                group._all_gather_result = None
        state._state_ctx.is_last_backward = True
        part.reset_iter_state()
        part.set_requires_gradient_sync(True)
