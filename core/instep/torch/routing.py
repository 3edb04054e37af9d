"""How process groups become handles: registered backends, and one reversible wrapper that routes explicit groups to them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, _DistributedBackendOptions

from instep.model import Group
from instep.torch.gate import Gate
from instep.torch.handle import Handle
from instep.torch.plain_handle import PlainHandle, options_of

BACKEND = "instep"
PLAIN = "instep_nccl"
_ROUTED = {"gloo": BACKEND, "cpu:gloo": f"cpu:{BACKEND}", "nccl": PLAIN, "cuda:nccl": f"cuda:{PLAIN}"}

if TYPE_CHECKING:
    from instep.torch.gate import AnyHandle

_gates: list[Gate] = []
"""The gate of the live session; torch's registry of backends has no way to pass it."""


class Routing:
    """Switches the routing on for one session, and off again."""

    def __init__(self, gate: Gate) -> None:
        if BACKEND.upper() not in c10d.Backend._plugins:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
            dist.Backend.register_backend(PLAIN, _create_plain, extended_api=True, devices=["cuda"])
        _gates.append(gate)
        self._stock: Callable[..., object] = c10d._new_process_group_helper
        c10d._new_process_group_helper = self._routed  # type: ignore[assignment]

    def close(self) -> None:
        """Undo the wrapper."""
        c10d._new_process_group_helper = self._stock
        _gates.clear()

    def _routed(self, group_size: int, group_rank: int, ranks: list[int], backend: object, *args: object, **kwargs: object) -> object:
        known = _ROUTED.get(str(backend).lower())
        return self._stock(group_size, group_rank, ranks, dist.Backend(known) if known else backend, *args, **kwargs)


def _create(options: "_DistributedBackendOptions", _pg_options: object) -> Handle:
    return Handle(_gates[-1], _group(options, "gloo"), options.group_rank)


def _create_plain(options: "_DistributedBackendOptions", pg_options: object) -> dist.ProcessGroup:
    handle = PlainHandle(_gates[-1], _group(options, "nccl"), options.group_rank, options_of(pg_options, options.timeout))
    return handle.process_group


def _group(options: "_DistributedBackendOptions", backend: str) -> Group:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return Group(name=str(options.group_id), ranks=ranks, backend=backend)


def first_group(size: int, backend: str) -> Group:
    """The first group of all ranks, over which instep itself gathers: the default one if that is gloo, else one of its own."""
    name = str(c10d._world.group_count) if backend == "gloo" else "instep"
    return Group(name=name, ranks=tuple(range(size)), backend="gloo")


def make_world(gate: Gate, *, rank: int, size: int, backend: str) -> None:
    """Make the default process group, without a message of torch's own. Before any but a gloo one, instep makes its own group."""
    if backend != "gloo":
        Handle(gate, first_group(size, backend), rank)
    dist.init_process_group(_ROUTED[backend], store=HashStore(), rank=rank, world_size=size)


def handle_of(group: dist.ProcessGroup) -> "AnyHandle | dist.ProcessGroup":
    """The handle whose group this is; the group itself if it has none."""
    handles = _gates[-1].handles if _gates else []
    return next((handle for handle in handles if handle.process_group is group), group)


def count() -> int:
    """c10d's name counter; groups made in a block are unmade by setting it back."""
    return int(c10d._world.group_count)


def unmake(gate: Gate, *, handles: int, counter: int) -> None:
    """Destroy the handles beyond the first ``handles`` and set c10d's name counter back, so that a repeated block finds the same names."""
    c10d._world.pg_coalesce_state.clear()
    for handle in reversed(gate.handles[handles:]):
        if handle.process_group in c10d._world.pg_group_ranks:
            dist.destroy_process_group(handle.process_group)
            gate.forget(handle)
        else:
            _forget(gate, handle)
    c10d._world.group_count = counter


def _forget(gate: Gate, handle: "AnyHandle") -> None:
    """Destroy a handle whose making was cut: c10d knows it in part, if at all."""
    gate.forget(handle)
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        table.pop(handle.process_group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [group for group in groups if group is not handle.process_group]
    c10d._unregister_process_group(c10d.GroupName(handle.label))  # type: ignore[attr-defined]
