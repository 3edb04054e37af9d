"""``session.protect``: sorts objects into shared and private state by their type."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from instep.errors import UsageError
from instep.torch import loaders, zero1
from instep.torch.adapter import Adapter, Port

if TYPE_CHECKING:
    from instep.torch.local import LocalRank

_MEGATRON = ("megatron.core.distributed", "megatron.core.optimizer")
"""Where the classes are defined whose state lies in shards that only the adapter of Megatron knows; schedules too."""


def protect(local: "LocalRank", port: Port, objects: Mapping[str, object], private: Mapping[str, object]) -> None:
    """Take ``objects`` as shared state, loaders and generators among them and everything in ``private`` as private state.

    Adapters split their optimizer's step around ``port``.
    """
    state = local.state
    for name, obj in [*objects.items(), *private.items()]:
        if name in state.protected:
            raise UsageError(f"session.protect({name}=...): {name!r} is protected already")
        state.protected[name] = obj
    zero1.check_beside(state.protected)
    for name, obj in objects.items():
        cursor = loaders.adopt(name, obj, on_delivery=local.delivered)
        if cursor is not None:
            state.add_cursor(name, cursor)
            continue
        zero = zero1.sharded(obj)
        adapter = obj if zero is None else zero1.Zero1(name, zero)
        if isinstance(adapter, Adapter):
            adapter.attach(port, rank=local.rank, world_size=local.world_size)
            state.add_adapter(name, adapter)
            continue
        _needs_adapter(name, obj)
        state.shared.add(name, obj)
        if isinstance(obj, nn.Module):
            state.private.add_module(name, obj)
    for name, obj in private.items():
        _private(local, name, obj)


def _needs_adapter(name: str, obj: object) -> None:
    if any(cls.__module__.startswith(_MEGATRON) for cls in type(obj).__mro__):
        raise UsageError(
            f"session.protect({name}=...): a {type(obj).__qualname__} of Megatron needs the adapter, which knows its shards and splits its "
            "update: session.protect(training=Megatron(chunks, optimizer, scheduler)) with `from instep_state_replica.megatron import "
            "Megatron` (pip install 'instep-state-replica[megatron]')"
        )


def _private(local: "LocalRank", name: str, obj: object) -> None:
    state = local.state
    cursor = loaders.adopt(name, obj, on_delivery=local.delivered)
    if cursor is not None:
        state.add_cursor(name, cursor)
    elif isinstance(obj, nn.Module | torch.optim.Optimizer):
        raise UsageError(
            f"session.protect(private={{{name!r}: ...}}): a {type(obj).__name__} changes in commits, so it is shared; pass it as a keyword"
        )
    elif hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"):
        state.private.add_object(name, obj)
    else:
        raise UsageError(
            f"session.protect(private={{{name!r}: ...}}): a {type(obj).__name__} has no state_dict/load_state_dict; give it both, "
            "returning plain data, arrays or tensors"
        )
