"""A stock ``ProcessGroupNCCL`` on a plain group: made from the book, with the options of its predecessor, and given up in time."""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from instep.errors import CommsError
from instep_init_nccl.store import BookStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupNCCL

log = logging.getLogger(__name__)
_CARRIED = ("is_high_priority_stream", "config")
"""Options of a group that each of its communicators gets."""
_HEADS = (16, 20)
_LIBRARY = "libnccl.so.2"
"""torch has loaded it; its name finds the same one again."""
_LONGER_SINCE = (2, 29)


def head(version: Sequence[int]) -> int:
    """Length of the numbers in a hello of this NCCL."""
    return _HEADS[tuple(version[:2]) >= _LONGER_SINCE]


@dataclass
class NcclCommunicator:
    """A connected group. ``label`` is for messages; ``store`` is kept because torch keeps its C++ half only."""

    group: dist.ProcessGroup
    backend: "ProcessGroupNCCL"
    device: torch.device
    label: str
    store: BookStore = field(repr=False)
    aborted: threading.Event = field(default_factory=threading.Event, repr=False)

    def abandon(self) -> Callable[[], bool]:
        """Give it up without blocking; it may be dropped once its abort has ended."""
        return self.aborted.is_set


def options(given: object, *, seconds: float, ranks: Sequence[int], name: str) -> "dist.ProcessGroupNCCL.Options":
    """Fresh options for one communicator: ``given`` is what the script passed for the group, if anything, with a timeout of its own."""
    out: Any = dist.ProcessGroupNCCL.Options()
    out._timeout = timedelta(seconds=seconds)
    if given is not None:
        for field in _CARRIED:
            if hasattr(given, field):
                setattr(out, field, getattr(given, field))
        out._timeout = getattr(given, "_timeout", out._timeout)
    for field, value in (("global_ranks_in_group", list(ranks)), ("group_name", name)):
        if hasattr(out, field):
            setattr(out, field, value)
    chosen: dist.ProcessGroupNCCL.Options = out
    return chosen


def make(
    store: BookStore, *, rank: int, size: int, device: torch.device, chosen: "dist.ProcessGroupNCCL.Options", label: str
) -> NcclCommunicator:
    """The group, with a backend that has no communicator yet."""
    backend = dist.ProcessGroupNCCL(store, rank, size, chosen)
    outer = dist.ProcessGroup(HashStore(), rank, size)
    outer._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    outer._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return NcclCommunicator(outer, backend, device, label, store)


def revoke(communicators: Sequence[NcclCommunicator]) -> int:
    """Stop what is in flight on these communicators, where NCCL can (2.29) and torch tells their address; how many were stopped.

    It keeps resources and returns at once, unlike an abort, which still has to follow.
    """
    try:
        call: Any = ctypes.CDLL(_LIBRARY).ncclCommRevoke
    except (OSError, AttributeError):
        return 0
    count = 0
    for one in communicators:
        pointer = getattr(one.backend, "_comm_ptr", None)
        if pointer is None:
            continue
        try:
            address = int(pointer())
        except RuntimeError:
            continue  # it has no communicator yet
        if address:
            count += call(ctypes.c_void_p(address), ctypes.c_int(0)) == 0
    return count


class Aborting:
    """Aborts communicators in one group call, in a thread that may be left behind: an abort can hang in the driver."""

    def __init__(self, communicators: Sequence[NcclCommunicator], *, revoking: bool) -> None:
        self._communicators, self._revoking = list(communicators), revoking
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="instep-nccl-abort", daemon=True)
        self._thread.start()

    def wait(self, seconds: float, *, rank: int) -> None:
        """Wait for the end. Raises ``CommsError`` when it takes longer, or failed."""
        self._thread.join(seconds)
        labels = ", ".join(one.label for one in self._communicators)
        if self._thread.is_alive():
            raise CommsError(
                f"rank {rank}: aborting {labels} has not ended after {seconds:g} s: NCCL or the driver hangs, the process must be replaced"
            )
        if self._error is not None:
            raise CommsError(f"rank {rank}: aborting {labels}: {self._error}") from self._error

    def _run(self) -> None:
        try:
            if self._revoking:
                revoke(self._communicators)
            self._abort()
        except RuntimeError as error:
            self._error = error
        else:
            for one in self._communicators:
                one.aborted.set()

    def _abort(self) -> None:
        # One group call: aborts one by one can wait for each other across ranks (pytorch issue 119797).
        first: Any = self._communicators[0].backend
        grouped = hasattr(first, "_group_start")
        if grouped:
            first._group_start()
        try:
            for one in self._communicators:
                one.backend.abort()
        finally:
            if grouped:
                first._group_end()
