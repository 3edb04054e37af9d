"""A reader's care for its producer: one lives, makes the right stream, and moves; at the end none is left."""

import logging
import os
import signal
import subprocess
import time

from instep_mmap_loader.errors import NoRoom
from instep_mmap_loader.folder import PRODUCER, Folder
from instep_mmap_loader.launch import launch
from instep_mmap_loader.process import Identity, end
from instep_mmap_loader.recipe import Payload, Settings

log = logging.getLogger(__name__)
SILENT = 10.0
"""Seconds of this reader's own waiting without a heartbeat after which a producer counts as stopped."""
_LONGEST_TICK = 0.1
_MOST_LAUNCHES = 4
_CLOSE = 0.5


class Keeper:
    """Starts the producer of one directory, and ends it. The directory's lock says whether one lives."""

    def __init__(self, folder: Folder, settings: Settings, payload: Payload) -> None:
        self._folder, self._settings, self._payload = folder, settings, payload
        self._starting: subprocess.Popen[bytes] | None = None
        self._launches = self._beat = 0
        self._silent = self._looked = 0.0

    def proved(self) -> None:
        """A batch arrived, so the producer works."""
        self._launches = 0

    def ensure(self) -> None:
        """There is a living producer of this very stream; start one if not.

        Raises:
            NoRoom: the last one said why there can be none, or each one dies before it makes a batch.
        """
        if self._starting is not None and self._starting.poll() is not None:
            self._starting = None
        lock = self._folder.lock()
        if lock is None:
            self._check()
            return
        try:
            failed = self._folder.noted(PRODUCER).get("failed")
            if failed is not None and self._launches:
                raise NoRoom(str(failed))
            if self._launches >= _MOST_LAUNCHES:
                raise NoRoom(f"the producer of {self._folder.path} died {self._launches} times in a row without making a batch")
            self._launches += 1
            self._folder.reserve(PRODUCER)
            self._starting = launch(self._settings, self._payload, lock)
        finally:
            os.close(lock)

    def end(self) -> None:
        """End the producer, also one that is only about to start: the lock tells when it is gone."""
        until = time.monotonic() + _CLOSE
        while time.monotonic() < until:
            identity = Identity.parse(self._folder.noted(PRODUCER))
            if identity is not None and identity.alive():
                end(identity, signal.SIGKILL, seconds=_CLOSE)
            lock = self._folder.lock() if self._folder.there else None
            if lock is not None:
                os.close(lock)
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Reap what started the producer."""
        if self._starting is not None:
            self._starting.wait(2 * _CLOSE)

    def abandon(self) -> None:
        """What started the producer is no child of this forked process, so it cannot wait for it."""
        if self._starting is not None and self._starting.returncode is None:
            self._starting.returncode = 0

    def _check(self) -> None:
        """End a producer of another stream, or one whose heart stands still while this reader waits."""
        note = self._folder.noted(PRODUCER)
        identity = Identity.parse(note)
        if identity is None or not identity.alive():
            return
        if note.get("fingerprint") != self._settings.fingerprint:
            if not end(identity, signal.SIGTERM, seconds=_CLOSE):
                end(identity, signal.SIGKILL, seconds=_CLOSE)
            return
        beat = os.stat(PRODUCER, dir_fd=self._folder.fd).st_mtime_ns
        now = time.monotonic()
        self._silent = self._silent + min(now - self._looked, _LONGEST_TICK) if beat == self._beat else 0.0
        self._beat, self._looked = beat, now
        if self._silent > SILENT:
            log.warning("the producer %d of %s does not move; it is replaced", identity.pid, self._folder.path)
            end(identity, signal.SIGKILL, seconds=_CLOSE)
            self._silent = 0.0
