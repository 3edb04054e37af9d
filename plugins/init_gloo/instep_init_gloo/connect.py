"""Connecting groups in a helper thread, so that the main thread can leave when the incarnation is out of date."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from instep.errors import CommsError, InstepError
from instep.model import AddressBook, Group
from instep_init_gloo.device import Device
from instep_init_gloo.store import Rendezvous
from instep_init_gloo.wire import Endpoint

_POLL = 0.002
_REMOTE = re.compile(r"remote=\[?([0-9a-fA-F.:]+?)\]?:(\d+)\$")


@dataclass(frozen=True)
class Limits:
    """Seconds that connecting one group, and later one operation, may take; worker threads of a group."""

    connect: float
    operation: float
    threads: int


@dataclass
class GlooCommunicator:
    """A connected group. Dropping the last reference joins gloo's threads: never do that on the main path."""

    group: dist.ProcessGroup
    at: Rendezvous

    def abandon(self) -> Callable[[], bool]:
        """Nothing to do: ``quiesce`` has shut the sockets, and whoever holds the works knows when they ended."""
        return lambda: True


def endpoints(group: Group, book: AddressBook, plugin: str) -> dict[int, Endpoint]:
    """Where each member of ``group`` listens, by group rank. Raises ``CommsError`` naming members that announced nothing."""
    addresses = {address.rank: address for address in book.addresses}
    found: dict[int, Endpoint] = {}
    for position, rank in enumerate(group.ranks):
        notes = book.notes[rank].get(plugin) if rank < len(book.notes) else None
        pairs = notes.get("pairs") if isinstance(notes, dict) else None
        first = pairs.get(group.name) if isinstance(pairs, dict) else None
        host = notes.get("host") if isinstance(notes, dict) else None
        if not isinstance(first, int) or not isinstance(host, str) or rank not in addresses:
            raise CommsError(f"{_name(group, book)}: rank {rank} announced nothing for it; all members must announce a group first")
        found[position] = Endpoint(host, addresses[rank].ports["gloo"], first)
    return found


class Connecting(threading.Thread):
    """Connects groups one after the other, then makes sure that every member is there."""

    def __init__(
        self, device: Device, *, rank: int, book: AddressBook, limits: Limits, groups: Sequence[tuple[Group, Mapping[int, Endpoint]]]
    ) -> None:
        super().__init__(name="instep-gloo-connect", daemon=True)
        self._device, self._rank, self._book, self._limits, self._groups = device, rank, book, limits, groups
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._cancelled = False
        self._at: Rendezvous | None = None
        self._progress = 0
        self._made: list[GlooCommunicator] = []
        self._error: CommsError | None = None

    def run(self) -> None:
        """Connect; whatever was made is dropped in this thread when nobody wants it any more."""
        made: list[GlooCommunicator] = []
        try:
            made = self._connect()
        except CommsError as error:
            self._error = error
        except RuntimeError as error:
            self._error = self._explain(error)
        finally:
            with self._lock:
                if not self._cancelled and self._error is None:
                    self._made = made
                self._at = None
            self._done.set()

    def result(self, check: Callable[[], None]) -> list[GlooCommunicator]:
        """Wait for the groups, calling ``check`` every few milliseconds. On any exception the attempt is abandoned."""
        try:
            self._wait(check)
        except BaseException:
            self._abandon()
            raise
        if self._error is not None:
            raise self._error
        if len(self._made) != len(self._groups):
            raise InstepError("connecting gloo groups ended without a result; the log has the cause")
        return self._made

    def _connect(self) -> list[GlooCommunicator]:
        made: list[tuple[dist.ProcessGroupGloo, GlooCommunicator]] = []
        for group, where in self._groups:
            at = self._device.rendezvous(group.ranks.index(self._rank), where)
            with self._lock:
                if self._cancelled:
                    return []
                self._at = at
            made.append(self._one(group, at))
            at.verify()
            self._progress += 1
        for work in [communicator.group.barrier() for _, communicator in made]:
            work.wait()
        for backend, _ in made:
            backend.set_timeout(timedelta(seconds=self._limits.operation))
        return [communicator for _, communicator in made]

    def _one(self, group: Group, at: Rendezvous) -> tuple[dist.ProcessGroupGloo, GlooCommunicator]:
        rank, size = group.ranks.index(self._rank), len(group.ranks)
        backend = self._device.connect(at, rank=rank, size=size, timeout=self._limits.connect, threads=self._limits.threads)
        outer = dist.ProcessGroup(at.store, rank, size)
        outer._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        outer._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        outer._set_group_name(GroupName(f"{group.name}#{self._book.incarnation}"))
        return backend, GlooCommunicator(outer, at)

    def _wait(self, check: Callable[[], None]) -> None:
        seen, deadline = -1, 0.0
        while not self._done.wait(_POLL):
            check()
            at = self._at
            if at is not None:
                at.verify()
            if self._progress != seen:
                seen, deadline = self._progress, time.monotonic() + self._limits.connect + 0.5
            elif time.monotonic() > deadline:
                raise CommsError(f"{self._where()}: some members did not connect within {self._limits.connect} s")

    def _abandon(self) -> None:
        """Leave the thread to its own timeout, once the pair numbers that it takes are known to be taken."""
        with self._lock:
            self._cancelled = True
            self._made = []
            at = self._at
        deadline = time.monotonic() + self._limits.connect
        while at is not None and not at.written() and not self._done.wait(_POLL) and time.monotonic() < deadline:
            continue

    def _explain(self, error: RuntimeError) -> CommsError:
        text = str(error).splitlines()[0]
        missing = _REMOTE.search(text)
        ranks = [a.rank for a in self._book.addresses if missing and a.ports.get("gloo") == int(missing[2])]
        who = f"rank {ranks[0]} at {missing[1]}:{missing[2]} is not there" if missing and ranks else "a member is gone"
        return CommsError(f"{self._where()}: {who} ({text})")

    def _where(self) -> str:
        return _name(self._groups[min(self._progress, len(self._groups) - 1)][0], self._book)


def _name(group: Group, book: AddressBook) -> str:
    return f"gloo group {group.name!r} over ranks {list(group.ranks)} in incarnation {book.incarnation}"
