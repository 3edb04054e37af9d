"""Stable handles: process groups that keep their identity while recovery swaps the communicator inside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from instep.errors import UsageError
from instep.hooks import Communicator
from instep.model import Group
from instep.torch.gate import Gate
from instep.torch.ops import OPS, Op
from instep.torch.works import finished

_CPU = torch.device("cpu")


class Handle(dist.ProcessGroup):
    """A process group for ever: DDP, FSDP and friends hold it, ``communicator`` changes with each incarnation.

    ``sequence`` counts the operations issued; ``label`` is the c10d name of the group.
    """

    def __init__(self, gate: Gate, group: Group, rank: int) -> None:
        gate.outside_body(f"process group {group.name!r}")
        super().__init__(rank, len(group.ranks))  # type: ignore[call-arg]
        self.group = group
        self.label = group.name
        self.communicator: Communicator | None = None
        self.sequence = 0
        self._gate, self._rank = gate, rank
        self._name = group.name
        self._script: list[list[Tensor]] | None = None
        gate.handles.append(self)
        if not gate.loopback and self.size() > 1:
            try:
                self.communicator = gate.connect(self)
            except BaseException:
                gate.forget(self)
                raise

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that c10d knows: itself."""
        return self

    @property
    def connects(self) -> bool:
        """Whether it is to be connected: alone it needs nobody."""
        return self.size() > 1

    def rank(self) -> int:
        """Own rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return len(self.group.ranks)

    @contextmanager
    def scripted(self, results: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Answer the next broadcasts with ``results``, alone; everything else loops back. All results must be used up."""
        self._script = [list(r) for r in results]
        try:
            yield
            if self._script:
                raise UsageError(
                    f"{len(self._script)} of {len(results)} scripted results of process group {self.label!r} were not asked for"
                )
        finally:
            self._script = None

    def _scripted(self, op: Op, args: Sequence[object]) -> Work:
        outputs = op.outputs(args)
        op.loop(args, self._rank, self.size())
        if op.name == "broadcast" and self._script:
            for target, source in zip(outputs, self._script.pop(0), strict=True):
                target.copy_(source)
        return finished(outputs)

    # ---- what c10d asks of a process group besides collectives

    def getBackendName(self) -> str:  # noqa: N802 - name fixed by c10d
        """Name of the backend, for messages."""
        return "instep"

    def getGroupName(self) -> str:  # noqa: N802
        """Name under which functional collectives and DeviceMesh find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of ``getGroupName``."""
        self._name = str(name)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        communicator = self.communicator
        return self if communicator is None else communicator.group._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start with each communicator."""

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Timeouts belong to the comms plugin; a hang is found by the watchdog."""

    def abort(self) -> None:
        """Recovery aborts; a user's abort has nothing to do."""

    def shutdown(self) -> None:
        """Leave the registry; the communicator is dropped by the gate."""
        self._gate.forget(self)


def _method(op: Op) -> Callable[..., Work]:
    def method(self: Handle, *args: object, **kwargs: object) -> Work:
        return self._gate.issue(self, op, args, kwargs) if self._script is None else self._scripted(op, args)

    method.__name__ = op.name
    method.__doc__ = f"Forward ``{op.name}`` to the communicator inside."
    return method


for _op in OPS.values():
    setattr(Handle, _op.name, _method(_op))
