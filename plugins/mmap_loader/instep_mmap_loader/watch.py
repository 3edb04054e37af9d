"""The producer's watch: a heartbeat, and the end of everything when the job's agent is gone or the directory was removed."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

from instep_mmap_loader.folder import PRODUCER, Folder
from instep_mmap_loader.process import Identity

BEAT = 0.5


class Watch:
    """A thread beside the main thread, which a slow sampler or a slow import may keep busy. ``lock`` is held, never passed to forks."""

    def __init__(self, folder: Folder, agent: Identity | None, lock: int) -> None:
        self._folder = folder
        self._agent = agent.open() if agent is not None else None
        self._gone = agent is not None and self._agent is None
        self._stop, self._stopped = os.pipe()
        self._thread: threading.Thread | None = None
        held = [lock]

        def let_go() -> None:
            while held:
                os.close(held.pop())

        os.register_at_fork(after_in_child=let_go)

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No thread but the caller's, so that it may fork. In the child the watch stays off."""
        own = os.getpid()
        assert self._thread is not None
        os.write(self._stopped, b".")
        self._thread.join()
        os.read(self._stop, 1)
        try:
            yield
        finally:
            if os.getpid() == own:
                self.start()

    def _run(self) -> None:
        watched = [self._stop, *([self._agent] if self._agent is not None else [])]
        while True:
            if self._gone:
                self._end()
            ready, _, _ = select.select(watched, [], [], BEAT)
            if self._stop in ready:
                return
            if self._agent in ready:
                self._end()
            try:
                os.utime(PRODUCER, dir_fd=self._folder.fd)
            except FileNotFoundError:
                self._end()

    def _end(self) -> None:
        """The job is over: nothing is left, neither a file nor a process."""
        self._folder.remove()
        os.killpg(os.getpgrp(), signal.SIGKILL)
