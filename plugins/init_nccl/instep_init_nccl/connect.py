"""Connecting groups in a helper thread, so that the main thread can leave when the incarnation is out of date."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from instep.errors import CommsError, InstepError
from instep.model import Group
from instep_init_nccl import backend
from instep_init_nccl.backend import Aborting, NcclCommunicator
from instep_init_nccl.mini_root import MiniRoot
from instep_init_nccl.store import BookStore, Place

_POLL = 0.002


@dataclass(frozen=True)
class Limits:
    """Seconds that connecting one group, one operation and an abort may take. ``eager``: connect now, not with the first collective."""

    connect: float
    operation: float
    abort: float
    eager: bool


@dataclass(frozen=True)
class Wanted:
    """One group to connect: the own place in it, and what the script gave as its options."""

    group: Group
    place: Place
    options: object


class Connecting(threading.Thread):
    """Connects groups one after the other, each member in the same order."""

    def __init__(self, root: MiniRoot, wanted: Sequence[Wanted], *, rank: int, device: torch.device, head: int, limits: Limits) -> None:
        super().__init__(name="instep-nccl-connect", daemon=True)
        self._root, self._wanted, self._rank, self._device, self._head, self._limits = root, wanted, rank, device, head, limits
        self._done = threading.Event()
        self._cancelled = False
        self._made: list[NcclCommunicator] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Connect; what was made stays in ``made`` for whoever cleans up."""
        try:
            torch.cuda.set_device(self._device)
            for one in self._wanted:
                self._check()
                self._connect(one)
        except (InstepError, RuntimeError, ValueError) as error:
            self._error = error
        finally:
            self._done.set()

    def result(self, check: Callable[[], None]) -> list[NcclCommunicator]:
        """Wait for the groups, calling ``check`` every few milliseconds. On any exception all that was made is aborted."""
        try:
            self._wait(check)
            if self._error is not None:
                raise CommsError(f"{self._where()}: {self._error}") from self._error
        except BaseException:
            self._abandon()
            raise
        return self._made

    def _connect(self, one: Wanted) -> None:
        place = one.place
        store = BookStore(self._root, place, head=self._head, seconds=self._limits.connect, check=self._check)
        name = f"{one.group.name}#{place.incarnation}"
        chosen = backend.options(one.options, seconds=self._limits.operation, ranks=one.group.ranks, name=name)
        made = backend.make(store, rank=place.rank, size=place.size, device=self._device, chosen=chosen, label=name)
        self._made.append(made)
        if self._limits.eager:
            made.backend.eager_connect_single_device(self._device)

    def _wait(self, check: Callable[[], None]) -> None:
        seen, deadline = -1, 0.0
        while not self._done.wait(_POLL):
            check()
            if len(self._made) != seen:
                seen, deadline = len(self._made), time.monotonic() + self._limits.connect + 0.5
            elif time.monotonic() > deadline:
                raise CommsError(f"{self._where()}: some members did not connect within {self._limits.connect:g} s")

    def _abandon(self) -> None:
        """Leave the thread, and make NCCL give up: the mini root ends its wait for a neighbour, the abort what was connected."""
        self._cancelled = True
        self._root.give_up()
        if self._made:
            Aborting(self._made, revoking=False)

    def _check(self) -> None:
        if self._cancelled:
            raise CommsError("the attempt was given up")

    def _where(self) -> str:
        one = self._wanted[max(len(self._made) - 1, 0)]
        return f"rank {self._rank}: NCCL group {one.group.name!r} over ranks {list(one.group.ranks)} in incarnation {one.place.incarnation}"
