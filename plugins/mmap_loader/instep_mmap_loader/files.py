"""The record files of one stream: mapped once, recycled for ever, published and retired by rename."""

import mmap
import os
from collections import OrderedDict
from typing import Any

import numpy as np

from instep_mmap_loader.errors import NoRoom, Refused
from instep_mmap_loader.folder import Folder
from instep_mmap_loader.order import At
from instep_mmap_loader.room import room

SMALLEST = 1 << 16
_BLOCK = 512
_MOST_MAPPED = 128


def record_name(at: At) -> str:
    """The file name of the record at a place."""
    return f"r-{at.epoch}-{at.sample}"


def record_at(name: str) -> At | None:
    """The place that a file name tells, ``None`` for other files."""
    head, *numbers = name.split("-")
    return At(*map(int, numbers)) if head == "r" and len(numbers) == 2 and all(n.isdigit() for n in numbers) else None


class Mapped:
    """Mappings of files by inode: a recycled file is the same file, so its pages are mapped once."""

    def __init__(self, folder: Folder, *, writable: bool) -> None:
        self._folder, self._writable = folder, writable
        self._views: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()

    def view(self, name: str, *, needs: int = 0, limit: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """The whole file as bytes.

        Args:
            name: its name.
            needs: make it at least this large, with every page allocated.
            limit: but not larger than this.

        Raises:
            FileNotFoundError: there is no such file.
            Refused: it is empty.
            NoRoom: it cannot be made as large.
        """
        fd = self._folder.open(name, os.O_RDWR if self._writable else os.O_RDONLY)
        try:
            status = os.fstat(fd)
            if needs and (status.st_size < needs or status.st_blocks * _BLOCK < status.st_size):
                self._grow(fd, needs=needs, limit=limit)
                status = os.fstat(fd)
            known = self._views.get(status.st_ino)
            if known is not None and len(known) == status.st_size:
                self._views.move_to_end(status.st_ino)
                return known
            if status.st_size == 0:
                raise Refused("it is empty")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
            view = np.frombuffer(mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, protection), np.uint8)
            self._views[status.st_ino] = view
            while len(self._views) > _MOST_MAPPED:
                self._views.popitem(last=False)
            return view
        finally:
            os.close(fd)

    def _grow(self, fd: int, *, needs: int, limit: int) -> None:
        size = max(os.fstat(fd).st_size, rounded(needs))
        if size > limit:
            raise NoRoom(f"a batch needs a file of {size} bytes, the cache may make it {limit}")
        allocate(fd, size)


def rounded(needs: int) -> int:
    """The size of a file for records of about ``needs`` bytes."""
    return -(-(needs + needs // 16) // SMALLEST) * SMALLEST


def allocate(fd: int, size: int) -> None:
    """Allocate every page of a file now, so that no write can fail later. Raises ``NoRoom``."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise NoRoom(f"no {size} bytes of shared memory left: {error.strerror}") from error


class Pool:
    """The producer's book of record files: which are published, which are free, how many there may be."""

    def __init__(self, folder: Folder, *, slots: int, capacity: int | None) -> None:
        self._folder, self.slots, self._capacity = folder, slots, capacity
        self._made = 0
        self._sized = False
        self.free: list[str] = []
        self.published: dict[At, At] = {}
        self._writing: set[str] = set()

    @property
    def held(self) -> int:
        """Files that exist."""
        return len(self.free) + len(self.published) + len(self._writing)

    def take(self, keep: set[At]) -> str | None:
        """A file to write into: a free one, a new one, or the record that is needed least; ``None`` if all are needed."""
        if not self.free and self.held < self.slots:
            try:
                self._make(SMALLEST)
            except NoRoom:
                if not self.held:
                    raise
                self.slots = self.held
        if not self.free:
            victim = self._victim(keep)
            if victim is None:
                return None
            self.retire(victim)
        name = self.free.pop()
        self._writing.add(name)
        return name

    def limit(self) -> int:
        """Bytes that one file may have."""
        return self._capacity // self.slots if self._capacity is not None else 1 << 50

    def done(self, at: At, following: At, *, slot: str, size: int) -> None:
        """A record was published."""
        self._writing.discard(slot)
        self.published[at] = following
        if not self._sized:
            self._sized = True
            self._preallocate(size)

    def gone(self, slot: str) -> None:
        """A file is not there any more: somebody removed it, or it was published by a worker that died before it could say so."""
        self._writing.discard(slot)
        self.forget()

    def adopt(self, size: int) -> None:
        """Records of an earlier producer were found, the largest of ``size`` bytes: fill the pool up."""
        if size:
            self._sized = True
            self._preallocate(size)

    def retire(self, at: At) -> None:
        """A record becomes a free file."""
        del self.published[at]
        name = self._name()
        try:
            os.rename(record_name(at), name, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        except FileNotFoundError:
            return
        self.free.append(name)

    def forget(self) -> None:
        """Look which files a reader has taken out, or somebody removed."""
        names = set(self._folder.names())
        self.published = {at: following for at, following in self.published.items() if record_name(at) in names}
        self.free = [name for name in names if name.startswith("free-") and name not in self._writing]

    def _victim(self, keep: set[At]) -> At | None:
        """First what lies beyond the window, as after a roll-back; then what was delivered longest ago."""
        others = sorted(set(self.published) - keep)
        if not others:
            return None
        return others[-1] if keep and others[-1] > max(keep) else others[0]

    def _preallocate(self, size: int) -> None:
        """The first record tells how large files are: make all of them, or as many as there is room for."""
        free = room(self._folder.path) if self._capacity is None else min(room(self._folder.path), self._capacity - self.held * size)
        fitting = max(0, free - (free >> 5)) // size
        if self.held + fitting < self.slots:
            self.slots = max(1, self.held + fitting)
        try:
            while self.held < self.slots:
                self._make(size)
        except NoRoom:
            self.slots = self.held

    def _make(self, size: int) -> None:
        name = self._name()
        fd = self._folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            allocate(fd, size)
        except NoRoom:
            os.unlink(name, dir_fd=self._folder.fd)
            raise
        finally:
            os.close(fd)
        self.free.append(name)

    def _name(self) -> str:
        self._made += 1
        return f"free-{os.getpid()}-{self._made}"
