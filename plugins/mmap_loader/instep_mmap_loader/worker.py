"""One process of the producer that runs the user's code: it fetches a batch, writes it into a recycled file, and publishes that."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, cast

from instep import codec
from instep.errors import UsageError
from instep_mmap_loader.errors import NoRoom
from instep_mmap_loader.files import SMALLEST, Mapped, record_name
from instep_mmap_loader.folder import Folder
from instep_mmap_loader.order import At, Indices, Leg
from instep_mmap_loader.record import Draft, Kind, Label, draft, write
from instep_mmap_loader.sources import END, Source, StreamSource, be_worker

What = Literal["done", "full", "gone"]
_PR_SET_PDEATHSIG = 1
_MOST_TEXT = SMALLEST // 2


@dataclass(frozen=True)
class Order:
    """Make the batch of a leg in the file ``slot``. ``error``: publish that instead. ``state`` is the source's, if it must seek."""

    leg: Leg
    slot: str
    limit: int
    state: bytes | None = None
    error: str | None = None

    def encode(self) -> bytes:
        """As bytes."""
        at, indices, following = self.leg
        return codec.encode([*at, *following, indices, self.slot, self.limit, self.state, self.error])

    @classmethod
    def decode(cls, data: bytes) -> "Order":
        """Back from bytes."""
        epoch, sample, next_epoch, next_sample, indices, slot, limit, state, error = cast(list[object], codec.decode(data))
        leg = Leg(At(cast(int, epoch), cast(int, sample)), cast(Indices | None, indices), At(cast(int, next_epoch), cast(int, next_sample)))
        return cls(leg, cast(str, slot), cast(int, limit), cast(bytes | None, state), cast(str | None, error))


@dataclass(frozen=True)
class Answer:
    """What became of an order: ``done`` (published in a file of ``size`` bytes), ``full`` (not even a word fits), or ``gone`` (no file)."""

    what: What
    at: At
    next: At
    size: int
    slot: str

    def encode(self) -> bytes:
        """As bytes."""
        return codec.encode([self.what, *self.at, *self.next, self.size, self.slot])

    @classmethod
    def decode(cls, data: bytes) -> "Answer":
        """Back from bytes."""
        what, epoch, sample, next_epoch, next_sample, size, slot = cast(list[object], codec.decode(data))
        at, following = At(cast(int, epoch), cast(int, sample)), At(cast(int, next_epoch), cast(int, next_sample))
        return cls(cast(What, what), at, following, cast(int, size), cast(str, slot))


class Worker:
    """Fetches and publishes, order by order."""

    def __init__(self, source: Source, folder: Folder, *, fingerprint: str, generation: int) -> None:
        self._source, self._folder = source, folder
        self._fingerprint, self._generation = fingerprint, generation
        self._mapped = Mapped(folder, writable=True)

    def serve(self, orders: Connection) -> None:
        """Work until the producer is gone."""
        while True:
            try:
                data = orders.recv_bytes()
            except (EOFError, OSError):
                return
            orders.send_bytes(self.make(Order.decode(data)).encode())

    def make(self, order: Order) -> Answer:
        """Carry out one order."""
        record = self._error(order.leg, order.error) if order.error is not None else self._fetched(order)
        leg = order.leg
        try:
            try:
                view = self._mapped.view(order.slot, needs=record.needs, limit=order.limit)
            except NoRoom as error:
                record = draft(self._label("bypass", record.label.at, record.label.next), f"the batch does not fit into the cache: {error}")
                view = self._mapped.view(order.slot, needs=record.needs, limit=max(order.limit, SMALLEST))
            write(record, view)
            os.rename(order.slot, record_name(leg.at), src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        except NoRoom:
            return Answer("full", leg.at, leg.next, 0, order.slot)
        except FileNotFoundError:
            return Answer("gone", leg.at, leg.next, 0, order.slot)
        return Answer("done", leg.at, record.label.next, len(view), order.slot)

    def _fetched(self, order: Order) -> Draft:
        leg, source = order.leg, self._source
        try:
            made = source.fetch(leg.at, order.state) if isinstance(source, StreamSource) else source.fetch(leg)
        except Exception:  # noqa: BLE001 - the user's code; the trainer raises it
            return self._error(leg, traceback.format_exc())
        if made.batch is END:
            return draft(self._label("end", leg.at, made.next), None, made.state)
        try:
            return draft(self._label("batch", leg.at, made.next), made.batch, made.state)
        except UsageError as error:
            return draft(self._label("bypass", leg.at, made.next), str(error))

    def _error(self, leg: Leg, text: str) -> Draft:
        return draft(self._label("error", leg.at, leg.next), text[-_MOST_TEXT:])

    def _label(self, kind: Kind, at: At, following: At) -> Label:
        return Label(kind, at, following, self._fingerprint, self._generation)


def work(worker: Worker, orders: Connection, *, parent: int, number: int, count: int, init: Callable[[int], None] | None) -> None:
    """A worker's whole life, in a process just forked; it and what it forks itself die with their parents."""
    code = 1
    try:
        _die_with_parent()
        if os.getppid() != parent:
            return
        os.register_at_fork(after_in_child=_die_with_parent)
        be_worker(number, count)
        if init is not None:
            init(number)
        worker.serve(orders)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked copy of the producer must not go on as one
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
