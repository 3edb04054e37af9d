"""Ending torch's loader iterators without waiting for their worker processes.

A worker finishes the batch in hand before it ends, which may take seconds: a thread waits for that. The pipes are closed by the main
thread afterwards, as it also forks: a fork in the midst of another thread's ``Connection.close`` leaves the child with a stale
descriptor number, which it would close a second time.
"""

import sys
import threading
from typing import Protocol, cast

from torch.utils.data._utils import signal_handling

_PATIENCE = 5.0


class _Queue(Protocol):
    _thread: threading.Thread | None

    def put(self, item: object) -> None: ...
    def cancel_join_thread(self) -> None: ...
    def close(self) -> None: ...


class _Event(Protocol):
    def set(self) -> None: ...


class _Worker(Protocol):
    def join(self, timeout: float) -> None: ...
    def is_alive(self) -> bool: ...
    def terminate(self) -> None: ...


class _WorkersIterator(Protocol):
    """What is used of torch's multi-process iterator, StatefulDataLoader's included."""

    _shutdown: bool
    _worker_pids_set: bool
    _workers_done_event: _Event
    _index_queues: list[_Queue]
    _worker_result_queue: _Queue
    _workers: list[_Worker]
    _pin_memory_thread: threading.Thread
    _pin_memory_thread_done_event: _Event


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
        iterator._shutdown = True  # its destructor has nothing to do any more, wherever it runs
        if iterator._worker_pids_set:
            # torch would raise in the main thread when one of them dies
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        thread = threading.Thread(target=_end_workers, args=(iterator,), name="instep-loader-end", daemon=True)
        thread.start()
        self._ending.append((thread, iterator))

    def collect(self) -> None:
        """Close the pipes of those that ended."""
        for entry in [e for e in self._ending if not e[0].is_alive()]:
            self._ending.remove(entry)
            iterator = entry[1]
            for queue in [*iterator._index_queues, iterator._worker_result_queue]:
                queue.cancel_join_thread()
                queue.close()
                if queue._thread is not None:
                    queue._thread.join(1.0)


def _end_workers(iterator: _WorkersIterator) -> None:
    """The order of torch's own ``_shutdown_workers``: the pinning thread first, as it reads what the workers send."""
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))
        iterator._pin_memory_thread.join()
    iterator._workers_done_event.set()
    for queue in iterator._index_queues:
        queue.put(None)
    for worker in iterator._workers:
        worker.join(_PATIENCE)
        if worker.is_alive():
            worker.terminate()
            worker.join(_PATIENCE)
