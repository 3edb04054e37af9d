"""Stable handles for backends that torch coalesces: a process group of exactly the stock type, whose backend is registered anew.

torch coalesces point-to-point operations (``batch_isend_irecv``) only if ``type(group) is ProcessGroup``, and NCCL may deadlock without. So
this handle is no subclass and sees no collective: nothing is checked at its entry, recorded or replayed. What fails a collective
on it is the abort of its backend; until a replacement joins, torch's own fake backend answers it alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from instep.arguments import GroupOptions
from instep.errors import CommsError, UsageError
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
        self._inside: tuple[dist.ProcessGroup.BackendType, Any] | None = None
        self._communicator: Communicator | None = None
        self._begin()
        gate.handles.append(self)
        try:
            if not gate.loopback:
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
            self._swap(communicator.group)

    @property
    def connects(self) -> bool:
        """Whether it is to be connected: as long as the script has not destroyed it, whatever its size."""
        self._made = self._made or self.process_group in c10d._world.pg_map
        return not self._made or self.process_group in c10d._world.pg_map

    @contextmanager
    def scripted(self, results: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Answer the next broadcasts with ``results``, alone; everything else loops back. All results must be used up."""
        answers = [list(r) for r in results]
        device, kind, fake = self._own
        self.process_group._register_backend(device, kind, fake)
        try:
            with _Answering(answers):
                yield
            if answers:
                raise UsageError(f"{len(answers)} of {len(results)} scripted results of process group {self.label!r} were not asked for")
        finally:
            if self._inside is not None:
                self.process_group._register_backend(device, *self._inside)

    def rank(self) -> int:
        """Own rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return len(self.group.ranks)

    def _begin(self) -> None:
        """Register torch's fake backend under the type by which torch knows the group's name and where a barrier runs.

        It answers alone until the first swap, and stays the default one, which is asked for hooks and sequence numbers only: DDP's logger
        refuses types that it does not know.
        """
        types = dist.ProcessGroup.BackendType
        device, kind = (torch.device("cuda"), types.NCCL) if torch.cuda.is_available() else (torch.device("cpu"), types.CUSTOM)
        make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        self._own = device, kind, make(self._rank, self.size())
        self.process_group._register_backend(*self._own)
        self.process_group._set_default_backend(kind)

    def _swap(self, inner: dist.ProcessGroup) -> None:
        if self._next > LAST:
            raise CommsError(
                f"process group {self.label!r} was connected {LAST - FIRST + 1} times, and torch has no room for one more backend in this "
                "process: the job has to start again"
            )
        kind = dist.ProcessGroup.BackendType(self._next)
        self._next += 1
        self._inside = kind, inner._get_backend(self._own[0])
        self.process_group._register_backend(self._own[0], *self._inside)


class _Answering(TorchDispatchMode):
    """Fills the tensors of each broadcast from the next answer. Calls from C++, as those of DDP's reducer, pass through here too."""

    def __init__(self, answers: list[list[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.broadcast_.default and self._answers:
            for target, source in zip(args[0], self._answers.pop(0), strict=True):
                target.copy_(source)
        return out


def options_of(given: object, timeout: timedelta) -> GroupOptions:
    """What ``new_group`` was given, for each communicator of the group."""
    return GroupOptions(timeout=timeout.total_seconds(), backend=given)
