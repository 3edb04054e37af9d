"""What an interrupted step leaves dirty in a survivor, and is cleaned before the step runs again."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.optim import Optimizer

from instep.torch import fsdp

_DEVICES = ("cpu", "cuda")


@runtime_checkable
class Undoing(Protocol):
    """A protected object of a framework whose own code changes shared state between two commits, and that can take this back."""

    def undo_step(self) -> None:
        """Bring that state back to the end of the last commit. Called on a survivor before it votes; may be repeated."""


@dataclass(frozen=True)
class Modes:
    """Torch's modes of the main thread. A signal may cut the very code that ends one."""

    grad_enabled: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    cache_enabled: bool
    nesting: int

    @classmethod
    def capture(cls) -> Self:
        """The present modes."""
        autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), _nesting())

    def restore(self) -> None:
        """Set them back, and drop cast weights."""
        torch.set_grad_enabled(self.grad_enabled)
        for device, (enabled, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)
        while _nesting() > self.nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def clean(objects: Iterable[object], modes: Modes) -> None:
    """Drop gradients, GradScaler stages and pending coalescing, and set torch's modes back."""
    modes.restore()
    c10d._world.pg_coalesce_state.clear()
    for obj in objects:
        if isinstance(obj, nn.Module):
            fsdp.reset(obj)
        if isinstance(obj, nn.Module | Optimizer):
            obj.zero_grad(set_to_none=True)
        elif isinstance(obj, GradScaler):
            obj._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        elif isinstance(obj, Undoing):
            obj.undo_step()
