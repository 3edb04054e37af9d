"""Stable handles for backends that torch coalesces: a process group of exactly the stock type, whose backend is registered anew.

torch coalesces point-to-point operations (``batch_isend_irecv``) only if ``type(group) is ProcessGroup``, and NCCL may deadlock without. So
this handle is no subclass and sees no collective: nothing is checked at its entry, recorded or replayed. What fails a collective
on it is the abort of its backend; until a replacement joins, torch's own fake backend answers it alone.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from instep.arguments import GroupOptions
from instep.errors import CommsError
from instep.hooks import Communicator
from instep.model import Group
from instep.torch.gate import Gate

FIRST, LAST = 7, 255
"""Numbers of backend types that torch leaves free. Each swap takes one for the life of the process: torch cannot forget a backend."""


class PlainHandle:
    """Keeps ``process_group``, which DDP and friends hold, and swaps the backend inside whenever ``communicator`` is set."""

    def __init__(self, gate: Gate, group: Group, rank: int, options: GroupOptions) -> None:
        gate.outside_body(f"process group {group.name!r}")
        self.group, self.options = group, options
        self.label = group.name
        self.process_group = dist.ProcessGroup(HashStore(), rank, len(group.ranks))
        self._rank = rank
        self._next = FIRST
        self._made = False
        self._communicator: Communicator | None = None
        gate.handles.append(self)
        try:
            if gate.loopback:
                self._alone()
            else:
                self.communicator = gate.connect(self)
        except BaseException:
            gate.forget(self)
            raise

    @property
    def communicator(self) -> Communicator | None:
        """What is inside. Without one, the backend of the last one stays, aborted, so that collectives fail."""
        return self._communicator

    @communicator.setter
    def communicator(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        if communicator is not None:
            inner = communicator.group
            self._register([(device, inner._get_backend(device)) for device in inner._device_types])

    @property
    def connects(self) -> bool:
        """Whether it is to be connected: as long as the script has not destroyed it, whatever its size."""
        self._made = self._made or self.process_group in c10d._world.pg_map
        return not self._made or self.process_group in c10d._world.pg_map

    def rank(self) -> int:
        """Own rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return len(self.group.ranks)

    def _alone(self) -> None:
        make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        fake = make(self._rank, self.size())
        self._register([(torch.device(kind), fake) for kind in ("cpu", "cuda")])

    def _register(self, backends: list[tuple[torch.device, Any]]) -> None:
        if self._next > LAST:
            raise CommsError(
                f"process group {self.label!r} was connected {LAST - FIRST + 1} times, and torch has no room for one more backend in this "
                "process: the job has to start again"
            )
        kind = dist.ProcessGroup.BackendType(self._next)
        self._next += 1
        for device, backend in backends:
            self.process_group._register_backend(device, kind, backend)
        self.process_group._set_default_backend(kind)


def options_of(given: object, timeout: timedelta) -> GroupOptions:
    """What ``new_group`` was given, for each communicator of the group."""
    return GroupOptions(timeout=timeout.total_seconds(), backend=given)
