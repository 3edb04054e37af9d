"""Writes text to streams that may stop taking it (a pager, a terminal on hold) without ever making the agent wait."""

import os
import select
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import TextIO


class Outlet:
    """One thread that writes, in order, what it was given for any of several streams.

    A stream that cannot be written any more takes nothing from then on. One that lives in memory cannot block, and is written at once.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[TextIO, str] | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._given = self._done = 0
        self._failed: deque[tuple[TextIO, OSError]] = deque()
        self._dead: set[int] = set()

    @property
    def backlog(self) -> int:
        """Characters that are not written yet."""
        return self._given - self._done

    def write(self, stream: TextIO, text: str) -> None:
        """Write soon, behind all that was given before."""
        if _descriptor(stream) is None:
            self._put(stream, text)
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="instep-console", daemon=True)
            self._thread.start()
        self._given += len(text)
        self._queue.put((stream, text))

    def failed(self) -> tuple[TextIO, OSError] | None:
        """The next stream that could not be written, each once."""
        return self._failed.popleft() if self._failed else None

    def settle(self) -> None:
        """Wait until all is written or has failed: as long as whoever reads takes, like any program at its end. A signal ends it."""
        if self._thread is not None:
            written = Event()
            self._queue.put(written)
            written.wait()

    def close(self) -> None:
        """Settle, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
            else:
                self._put(*item)
                self._done += len(item[1])

    def _put(self, stream: TextIO, text: str) -> None:
        if id(stream) in self._dead:
            return
        try:
            _write(stream, text)
        except OSError as error:
            self._dead.add(id(stream))
            discard(stream)
            self._failed.append((stream, error))


def _write(stream: TextIO, text: str) -> None:
    """Write past the stream's own buffer, whose lock would keep the interpreter from ending while a write is stuck."""
    if (own := _descriptor(stream)) is None:
        stream.write(text)
        return
    data = memoryview(text.encode(stream.encoding, "backslashreplace"))  # a rank may print what this terminal cannot show
    while data:
        try:
            data = data[os.write(own, data) :]
        except BlockingIOError:
            select.select([], [own], [])


def discard(stream: TextIO) -> None:
    """Point a broken stream at nothing, so that what is left in its buffer cannot fail again at the interpreter's end."""
    if (own := _descriptor(stream)) is not None:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, own)
            finally:
                os.close(null)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except OSError:
        return None
