"""Ending torch's loader iterators without waiting for their worker processes.

A worker finishes the batch in hand before it ends, which may take seconds: a thread waits for that. The pipes are closed by the main
thread afterwards, as it also forks: a fork in the midst of another thread's ``Connection.close`` leaves the child with a stale
descriptor number, which it would close a second time.
"""

import sys
import threading
from typing import Protocol, cast

from torch.utils.data._utils import signal_handling


class _Queue(Protocol):
    _thread: threading.Thread | None

    def put(self, item: None) -> None: ...


class _Event(Protocol):
    def set(self) -> None: ...


class _Worker(Protocol):
    def join(self, timeout: float) -> None: ...


class _WorkersIterator(Protocol):
    """What is used of torch's multi-process iterator, StatefulDataLoader's included."""

    _shutdown: bool
    _worker_pids_set: bool
    _workers_done_event: _Event
    _index_queues: list[_Queue]
    _workers: list[_Worker]

    def _shutdown_workers(self) -> None: ...


class Retired:
    """Iterators that are ending. Main thread only."""

    def __init__(self) -> None:
        self._ending: list[tuple[threading.Thread, _WorkersIterator]] = []

    def add(self, inner: object) -> None:
        """End ``inner``, if it has workers; returns at once."""
        if not hasattr(inner, "_shutdown_workers") or sys.is_finalizing():
            return
        iterator = cast(_WorkersIterator, inner)
        if iterator._shutdown:
            return
        if iterator._worker_pids_set:
            # torch would raise in the main thread when one of them dies
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        thread = threading.Thread(target=_wait, args=(iterator,), name="instep-loader-end", daemon=True)
        thread.start()
        self._ending.append((thread, iterator))

    def collect(self) -> None:
        """Close the pipes of those that ended."""
        for entry in [e for e in self._ending if not e[0].is_alive()]:
            self._ending.remove(entry)
            iterator = entry[1]
            iterator._shutdown_workers()
            for queue in iterator._index_queues:
                if queue._thread is not None:
                    queue._thread.join(1.0)


def _wait(iterator: _WorkersIterator) -> None:
    iterator._workers_done_event.set()
    for queue in iterator._index_queues:
        queue.put(None)
    for worker in iterator._workers:
        worker.join(5.0)
