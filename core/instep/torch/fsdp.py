"""Modules of ``fully_shard``: what an interrupted step leaves in them, what a script switches on them, and what cannot be recovered."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from instep.errors import UsageError

_AUTOMATIC = -1
"""Number in place of a mesh size: torch decides itself whether parameters are sharded again after forward."""


def check(module: nn.Module, name: str) -> None:
    """Raises ``UsageError`` for a module whose sharding could not be recovered."""
    if isinstance(module, FullyShardedDataParallel):
        raise UsageError(
            f"{name}: FullyShardedDataParallel flattens parameters and keeps its communication out of reach, so a step of it cannot be "
            "taken back; use torch.distributed.fsdp.fully_shard (FSDP2), with a two-dimensional mesh where each shard is to have a replica"
        )
    if isinstance(module, FSDPModule) and not hasattr(FSDPModule, "reset_iter_state"):
        raise UsageError(
            f"{name}: torch {torch.__version__} has no FSDPModule.reset_iter_state(), by which fully_shard forgets a step that was cut; "
            "use torch 2.13 or newer"
        )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Parameters of these are their shards again, whatever a forward pass without backward left gathered. Local, and free if so."""
    for part in modules:
        if isinstance(part, FSDPModule):
            part.reshard()


def reset(module: nn.Module) -> None:
    """Bring every root that ``fully_shard`` made inside a module back to where an iteration starts: parameters are sharded again.

    Works that were cut are dropped, not waited for. A signal may have cut torch's own code: what it leaves half done is done again.
    """
    parts = list(_parts(module))
    for state in map(_state, parts):
        for group in state._fsdp_param_groups:
            _drop(group)
        if state._is_root and not _initialised(state):
            _begin_again(state, parts)
    for part in parts:
        state = _state(part)
        if state._is_root:
            part.reset_iter_state()
        elif state._is_root is None:
            part.reshard()


class Switches:
    """What a script may switch while it trains: gradient synchronisation, the last backward, resharding after forward and backward.

    Private state, as training flags are: all of it as the last commit found it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._states = [_state(part) for part in _parts(module)]
        self._groups = [(state, group) for state in self._states for group in state._fsdp_param_groups]
        self._meshes = [group.post_forward_mesh_info for _, group in self._groups]

    def __bool__(self) -> bool:
        """Whether there is anything to switch."""
        return bool(self._states)

    def state_dict(self) -> dict[str, object]:
        """A byte of flags for each state and each group, and the size of the mesh that parameters are sharded on after forward."""
        return {
            "last": bytes(state._state_ctx.is_last_backward for state in self._states),
            "flags": bytes(g.reduce_grads + 2 * g.all_reduce_grads + 4 * g.reshard_after_backward for _, g in self._groups),
            "forward": [_AUTOMATIC if s._auto_reshard_after_forward else _size(g) for s, g in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Set all of them as they were."""
        last, flags, forward = state["last"], state["flags"], state["forward"]
        assert isinstance(last, bytes)
        assert isinstance(flags, bytes)
        assert isinstance(forward, list)
        for each, on in zip(self._states, last, strict=True):
            each._state_ctx.is_last_backward = bool(on)
        for (each, group), bits, size, mesh in zip(self._groups, flags, forward, self._meshes, strict=True):
            group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward = bool(bits & 1), bool(bits & 2), bool(bits & 4)
            automatic = each._auto_reshard_after_forward
            each._auto_reshard_after_forward = size == _AUTOMATIC
            if size == _AUTOMATIC and not automatic:
                group.post_forward_mesh_info = None if each._is_root else mesh
            elif size not in (_AUTOMATIC, _size(group)):
                fitting = (each for each in (mesh, group.mesh_info) if isinstance(each, FSDPMeshInfo) and each.shard_mesh_size == size)
                group.post_forward_mesh_info = next(fitting, None)


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _state(part: FSDPModule) -> FSDPState:
    return part._get_fsdp_state()


def _size(group: FSDPParamGroup) -> int:
    return 0 if group.post_forward_mesh_info is None else group.post_forward_mesh_info.shard_mesh_size


def _drop(group: FSDPParamGroup) -> None:
    """Forget what nobody waits for any more, gradients of micro-batches that were not reduced yet included."""
    group._all_gather_result = None
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            whole.grad = None
    if group.is_sharded and any(parameter.sharded_state != ShardedState.SHARDED for parameter in group.fsdp_params):
        group._sharded_state = ShardedState.UNSHARDED


def _initialised(state: FSDPState) -> bool:
    """Whether torch's first forward pass came to the end of its preparations, of which the groups are the last part."""
    groups = [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
    return bool(state._state_ctx.all_states) and all(group._module_to_pre_load_state_dict_hook_handle for group in groups)


def _begin_again(root: FSDPState, parts: list[FSDPModule]) -> None:
    below = {id(module) for owner in root._modules for module in owner.modules()}
    for part in parts:
        if id(part) in below:
            state = _state(part)
            state._is_root, state._training_state = None, TrainingState.IDLE
    root._state_ctx.all_states.clear()
