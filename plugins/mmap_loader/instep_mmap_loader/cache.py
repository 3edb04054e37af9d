"""The reader's side of the cache: claims a place in a directory, takes records, and sees to it that a producer runs."""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from instep_mmap_loader.claim import claim
from instep_mmap_loader.desk import drain
from instep_mmap_loader.errors import LoaderError, Refused
from instep_mmap_loader.files import Mapped, record_at, record_name, rounded
from instep_mmap_loader.folder import PRODUCER
from instep_mmap_loader.keeper import Keeper
from instep_mmap_loader.order import At
from instep_mmap_loader.process import Identity
from instep_mmap_loader.recipe import Payload, Settings
from instep_mmap_loader.record import Content, Label, draft, peek, read, write

log = logging.getLogger(__name__)
_POLL = 0.05
_LOOK = 0.5
_CLOSE = 0.3


@dataclass(frozen=True)
class Place:
    """Which directory and reader: ``run`` is a directory, the streams in it are ``settings.name`` and a number."""

    run: Path
    reader: int
    settings: Settings


class Cache:
    """One reader of one stream. Everything it needs to go on after a crash is in the directory."""

    def __init__(self, place: Place, payload: Payload, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self._place, self._payload, self._allocate = place, payload, allocate
        self._stand: tuple[At, At] | None = None
        self._looked = 0.0
        self._open()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._folder.path

    def stand(self, delivered: At, committed: At) -> None:
        """Tell the producer where this reader stands."""
        if self._stand != (delivered, committed):
            self._stand = delivered, committed
            self._desk.stand(delivered, committed)

    def stood(self) -> At | None:
        """Where the reader before this one stood."""
        return self._desk.stood()

    def leave_state(self, at: At, state: bytes) -> None:
        """Tell the producer a stateful source's state at a place, in case that it must seek there."""
        name = f"seek-{self._place.reader}"
        record = draft(Label("end", at, at, self._settings.fingerprint, 0), None, state)
        data = np.zeros(rounded(record.needs), np.uint8)
        write(record, data)
        with contextlib.suppress(OSError):  # a full file system; the record before this place may hold the state as well
            with open(self._folder.open(f"{name}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(data.tobytes())
            os.rename(f"{name}.new", name, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)

    def look(self, at: At) -> Content | None:
        """The record at a place, if it is there and sound; a damaged one is taken out, to be made again."""
        try:
            content = read(self._mapped.view(record_name(at)), fingerprint=self._settings.fingerprint, allocate=self._allocate)
            if content.label.at != at:
                raise Refused(f"it is the record of {content.label.at}")
        except FileNotFoundError:
            return None
        except Refused as error:
            log.warning("refused %s: %s; it is made again", self._folder.path / record_name(at), error)
            self.take_out(at)
            return None
        self._keeper.proved()
        return content

    def valid(self, at: At, most: int) -> int:
        """How many records from a place on are there, unverified."""
        count = 0
        with contextlib.suppress(FileNotFoundError, Refused):
            while count < most:
                label = peek(self._mapped.view(record_name(at)))
                if label.fingerprint != self._settings.fingerprint or label.kind != "batch":
                    break
                at, count = label.next, count + 1
        return count

    def begin(self, at: At) -> None:
        """Have the producer start, where the reader before this one stood, or else at ``at``."""
        if self.stood() is None:
            self.stand(at, at)
        self._ensure()

    def take(self, at: At, *, deadline: float, state: bytes | None = None) -> Content:
        """The record at a place, as soon as it is there. ``state`` is a stateful source's there.

        Raises:
            LoaderError: it was not made in time, or no producer stays alive.
            NoRoom: there is no cache any more; go on without it.
        """
        content = self.look(at)
        if content is not None:
            if time.monotonic() - self._looked > _LOOK:
                self._ensure()
            return content
        began = time.monotonic()
        if state is not None:
            self.leave_state(at, state)
        while True:
            self._ensure()
            if not self._waited(_POLL):
                self._desk.wake(b"r")  # the producer may count on a file that somebody removed
            content = self.look(at)
            if content is not None:
                return content
            if time.monotonic() - began > deadline:
                raise LoaderError(self._too_late(at, deadline))

    def take_out(self, at: At) -> None:
        """A record is damaged, or an error that was told: its file is free again."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(record_name(at), f"free-{os.getpid()}-{time.monotonic_ns()}", src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        self._desk.wake(b"r")

    def close(self, *, remove: bool) -> None:
        """Leave. ``remove``: if nobody else reads here, end the producer and remove every file, within a second."""
        if self._folder.fd < 0:
            return
        if remove:
            self._desk.leave()
            last = False
            with contextlib.suppress(LoaderError), self._folder.exclusive(seconds=_CLOSE):
                last = not any(self._folder.readers())
            if last and self._folder.there:
                self._keeper.end()
                self._folder.remove()
        self._keeper.close()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors of all that, as a forked child must: its parent reads on, and its death would not be seen."""
        self._keeper.abandon()
        self._desk.close()
        self._folder.close()

    def _open(self) -> None:
        self._folder, self._desk = claim(self._place.run, self._place.settings, self._place.reader)
        self._settings = replace(self._place.settings, folder=str(self._folder.path))
        self._mapped = Mapped(self._folder, writable=False)
        self._keeper = Keeper(self._folder, self._settings, self._payload)
        self._clean()

    def _ensure(self) -> None:
        """There is a living producer of this very stream."""
        self._looked = time.monotonic()
        with contextlib.suppress(FileNotFoundError):  # somebody is removing the directory; the next look finds it gone
            if not self._folder.there:
                self._again()
            self._keeper.ensure()

    def _clean(self) -> None:
        """Records of another data set, seed or sharding are of no use, nor are errors that the reader before this one was to be told."""
        before = self._folder.noted(PRODUCER).get("fingerprint")
        if others := before not in (None, self._settings.fingerprint):
            log.info("%s: the cache was made for another data set, seed or sharding; starting afresh", self._folder.path)
        for name in self._folder.names():
            at = record_at(name)
            if at is not None and (others or self._told(name)):
                self.take_out(at)

    def _told(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError, Refused):
            return peek(self._mapped.view(name)).kind == "error"
        return False

    def _again(self) -> None:
        """The directory was removed: claim a new one."""
        log.warning("%s was removed; the cache starts afresh", self._folder.path)
        self._desk.close()
        self._folder.close()
        self._open()
        stand, self._stand = self._stand, None
        if stand is not None:
            self.stand(*stand)

    def _waited(self, seconds: float) -> bool:
        told = bool(select.select([self._desk.pipe], [], [], seconds)[0])
        if told:
            drain(self._desk.pipe)
        return told

    def _too_late(self, at: At, deadline: float) -> str:
        identity = Identity.parse(self._folder.noted(PRODUCER))
        who = f"process {identity.pid}" if identity is not None else "no process"
        return (
            f"loader {self._settings.name!r}: the batch at epoch {at.epoch}, sample {at.sample} was not made within {deadline:g} s (the "
            f"producer is {who}): the data set blocks; look at it with py-spy, or raise timeout="
        )
