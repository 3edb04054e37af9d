"""What an interrupted step leaves dirty in a survivor, and is cleaned before the step runs again."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.optim import Optimizer


def clean(objects: Iterable[object], *, grad_enabled: bool) -> None:
    """Drop gradients, GradScaler stages, autocast caches, pending coalescing, and set grad mode back."""
    torch.set_grad_enabled(grad_enabled)
    torch.clear_autocast_cache()
    c10d._world.pg_coalesce_state.clear()
    for obj in objects:
        if isinstance(obj, nn.Module | Optimizer):
            obj.zero_grad(set_to_none=True)
        elif isinstance(obj, GradScaler):
            obj._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
