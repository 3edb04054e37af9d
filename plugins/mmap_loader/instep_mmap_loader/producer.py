"""The producer: a process that outlives its trainer, runs ahead of the readers, and leaves when nobody reads any more.

Its main thread runs the order and none of the data set's code, which its worker processes run; so it notices in any case that the job
is over. It keeps no state that matters: where the readers stand and which records exist is in the directory.
"""

import contextlib
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait

from instep_mmap_loader.desk import Standing
from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.files import Pool
from instep_mmap_loader.folder import WAKE, Folder
from instep_mmap_loader.inventory import state_at, take_over
from instep_mmap_loader.order import At, Leg
from instep_mmap_loader.recipe import Settings, WorkerInit
from instep_mmap_loader.sources import Source, StreamSource
from instep_mmap_loader.watch import Watch
from instep_mmap_loader.worker import Answer, Order, Worker, work

_POLL = 0.25
_LONGEST_TICK = 1.0
_AHEAD = 2


class Producer:
    """Keeps the window of records in front of the slowest reader filled."""

    def __init__(self, settings: Settings, folder: Folder, watch: Watch, generation: int) -> None:
        self._settings, self._folder, self._watch, self._generation = settings, folder, watch, generation
        self._pool = Pool(folder, slots=settings.prefetch + settings.lookback + 2, capacity=settings.capacity)
        self._standings: dict[int, Standing] = {}
        self._wake = folder.pipe(WAKE)
        self._workers: dict[Connection, tuple[int, int]] = {}
        self._making: dict[Connection, deque[Order]] = {}
        self._legs: deque[Leg] = deque()
        self._walk: Iterator[Leg] | None = None
        self._deadly: set[At] = set()
        self._errors: dict[At, str] = {}

    def start(self, source: Source, init: WorkerInit | None) -> None:
        """Take over what an earlier producer left, and fork the workers."""
        self._source, self._init = source, init
        take_over(self._folder, self._pool, fingerprint=self._settings.fingerprint)
        for number in range(self._settings.workers):
            self._fork(number)

    def run(self) -> None:
        """Produce until nobody reads any more."""
        alone, before = 0.0, time.monotonic()
        while alone < self._settings.idle:
            told = self._told()
            if told:
                self._fill(min(told), all_told=sum(s.told for s in self._standings.values()) >= self._settings.readers)
            for ready in wait([self._wake, *self._workers], _POLL):
                if isinstance(ready, Connection):
                    self._hear(ready)
                elif b"r" in os.read(self._wake, 1 << 16):
                    self._pool.forget()
            if (now := time.monotonic()) - before < _POLL:
                continue
            try:
                with self._folder.exclusive(seconds=0):
                    readers = self._folder.readers()
            except LoaderError:
                continue  # somebody is claiming a place
            if self._standings and not readers:
                return
            alone = 0.0 if any(readers) else alone + min(now - before, _LONGEST_TICK)
            before = now

    def _told(self) -> list[At]:
        for number in range(self._settings.readers):
            if number not in self._standings and self._folder.regular(f"reader-{number}"):
                with contextlib.suppress(LoaderError):
                    self._standings[number] = Standing(self._folder, number)
        return [told[0] for standing in self._standings.values() if (told := standing.read()) is not None]

    def _fill(self, start: At, *, all_told: bool) -> None:
        """Give every worker the next batch that is missing, and one more to go on with."""
        legs, error = self._window(start)
        keep = {leg.at for leg in legs} | (set() if all_told else set(self._pool.published))
        making = {order.leg.at for orders in self._making.values() for order in orders}
        missing = [leg for leg in legs if leg.at not in self._pool.published and leg.at not in making]
        for leg in missing:
            worker = min(self._workers, key=lambda worker: len(self._making[worker]))
            if len(self._making[worker]) >= _AHEAD or (slot := self._pool.take(keep)) is None:
                return
            order = Order(leg, slot, self._pool.limit(), self._state(leg.at), self._errors.pop(leg.at, error))
            self._making[worker].append(order)
            worker.send_bytes(order.encode())

    def _window(self, start: At) -> tuple[list[Leg], str | None]:
        """The batches from ``start`` on that are to exist, and what the order raised instead of telling them."""
        if isinstance(self._source, StreamSource):
            legs, at = [], start
            for _ in range(self._settings.prefetch):
                following = self._pool.published.get(at)
                legs.append(Leg(at, None, following or at))
                if following is None or following == at:
                    break
                at = following
            return legs, None
        try:
            while self._legs and self._legs[0].at < start:
                self._legs.popleft()
            if self._walk is None or not self._legs or self._legs[0].at != start:
                self._legs.clear()
                self._walk = self._source.order.walk(start)
            while len(self._legs) < self._settings.prefetch:
                self._legs.append(next(self._walk))
        except Exception:  # noqa: BLE001 - the user's sampler; the trainer raises it
            self._walk = None
            return [Leg(start, None, At(start.epoch + 1, 0))], traceback.format_exc()
        return list(self._legs), None

    def _state(self, at: At) -> bytes | None:
        """The source's state at a place, if it has one and stands elsewhere."""
        if not isinstance(self._source, StreamSource):
            return None
        return state_at(self._folder, self._pool, at, fingerprint=self._settings.fingerprint)

    def _hear(self, worker: Connection) -> None:
        try:
            answer = Answer.decode(worker.recv_bytes())
        except (EOFError, OSError):
            self._lost(worker)
            return
        self._making[worker].popleft()
        self._done(answer)

    def _done(self, answer: Answer) -> None:
        if answer.what == "full":
            raise MemoryError(f"the file system of {self._folder.path} is full")
        if answer.what == "gone":
            self._pool.gone(answer.slot)
            return
        self._pool.done(answer.at, answer.next, slot=answer.slot, size=answer.size)
        for standing in self._standings.values():
            standing.wake()

    def _lost(self, worker: Connection) -> None:
        """A worker died: another one takes its place and makes its batch. If that one dies of it too, the batch becomes an error."""
        pid, number = self._workers.pop(worker)
        worker.close()
        _, status = os.waitpid(pid, 0)
        orders = self._making.pop(worker)
        for order in orders:
            self._pool.gone(order.slot)
        if orders:
            leg = orders[0].leg
            if leg.at in self._deadly:
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                self._errors[leg.at] = f"worker process {pid} {how}, as was another, while it made the batch of {_few(leg.indices)}"
            self._deadly ^= {leg.at}
        self._fork(number)

    def _fork(self, number: int) -> None:
        mine, theirs = Pipe()
        parent = os.getpid()
        with self._watch.paused():
            pid = os.fork()
            if pid == 0:
                mine.close()
                for other in self._workers:
                    other.close()
                worker = Worker(self._source, self._folder, fingerprint=self._settings.fingerprint, generation=self._generation)
                work(worker, theirs, parent=parent, number=number, count=self._settings.workers, init=self._init)
        theirs.close()
        self._workers[mine], self._making[mine] = (pid, number), deque()


def _few(indices: object) -> str:
    text = str(indices)
    return text if len(text) < 200 else text[:200] + "...]"
