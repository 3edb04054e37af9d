"""Where a reader stands: ``produced >= delivered >= committed``, in a page that the producer reads and that outlives both of them."""

import mmap
import os
import struct
from typing import Self

import xxhash

from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.files import allocate
from instep_mmap_loader.folder import WAKE, Folder, locked
from instep_mmap_loader.order import At
from instep_mmap_loader.process import Identity

_PAGE = 4096
_PLACES = struct.Struct("<4q")
_SUM = struct.Struct("<Q")
_NOWHERE = At(-1, -1)


def reader_name(number: int) -> str:
    """The file in which reader ``number`` tells where it stands."""
    return f"reader-{number}"


class Desk:
    """One reader's page and pipes. ``take`` claims it; there is one living reader of each number, which has locked the page's file."""

    def __init__(self, folder: Folder, number: int, fd: int) -> None:
        self._folder, self.number, self._fd = folder, number, fd
        self._page = mmap.mmap(fd, 2 * _PAGE)
        self._wake = folder.pipe(WAKE)
        self.pipe = folder.pipe(f"{WAKE}-{number}")

    @classmethod
    def take(cls, folder: Folder, number: int, *, me: Identity) -> Self | None:
        """Become reader ``number`` of a stream, ``None`` if a living process is it already. Raises ``NoRoom``."""
        name = reader_name(number)
        with folder.exclusive():
            if not folder.there:
                raise FileNotFoundError(folder.path)
            fd = folder.open(name, os.O_RDWR | os.O_CREAT)
            try:
                if not locked(fd):
                    os.close(fd)
                    return None
                allocate(fd, 2 * _PAGE)
                folder.note(name, me.plain())
                return cls(folder, number, fd)
            except BaseException:
                os.close(fd)
                raise

    def stand(self, delivered: At, committed: At) -> None:
        """Tell where this reader stands, and wake the producer."""
        data = _PLACES.pack(*delivered, *committed)
        self._page[_PAGE : _PAGE + len(data) + _SUM.size] = data + _SUM.pack(xxhash.xxh3_64_intdigest(data))
        self.wake()

    def stood(self) -> At | None:
        """Where this reader, or the one before it of the same number, stood."""
        places = _places(self._page)
        return places[0] if places is not None and places[0] != _NOWHERE else None

    def wake(self, what: bytes = b".") -> None:
        """Have the producer look: ``r`` when a record was taken out."""
        _poke(self._wake, what)

    def leave(self) -> None:
        """This reader is gone for good."""
        self._page[:_PAGE] = b"{}".ljust(_PAGE)
        self.stand(_NOWHERE, _NOWHERE)

    def close(self) -> None:
        """Close everything."""
        self._page.close()
        for fd in (self._wake, self.pipe, self._fd):
            os.close(fd)


class Standing:
    """The producer's view of one reader. Raises ``LoaderError`` while its file is only being made."""

    def __init__(self, folder: Folder, number: int) -> None:
        fd = folder.open(reader_name(number), os.O_RDONLY)
        try:
            if os.fstat(fd).st_size < 2 * _PAGE:
                raise LoaderError(f"{folder.path / reader_name(number)} is too short")
            self._page = mmap.mmap(fd, 2 * _PAGE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._pipe = folder.pipe(f"{WAKE}-{number}")
        self._last: tuple[At, At] | None = None

    def read(self) -> tuple[At, At] | None:
        """Delivered and committed; ``None`` when it has told nothing yet or has left. A torn read gives the last answer."""
        self._last = _places(self._page) or self._last
        return self._last if self._last is not None and self._last[0] != _NOWHERE else None

    @property
    def told(self) -> bool:
        """Whether the reader has told where it stands, or that it left."""
        return self._last is not None

    def wake(self) -> None:
        """Tell the reader that something was published."""
        _poke(self._pipe, b".")


def _places(page: mmap.mmap) -> tuple[At, At] | None:
    data = page[_PAGE : _PAGE + _PLACES.size + _SUM.size]
    if _SUM.unpack(data[_PLACES.size :])[0] != xxhash.xxh3_64_intdigest(data[: _PLACES.size]):
        return None
    delivered_epoch, delivered, committed_epoch, committed = _PLACES.unpack(data[: _PLACES.size])
    return At(delivered_epoch, delivered), At(committed_epoch, committed)


def _poke(pipe: int, what: bytes) -> None:
    try:
        os.write(pipe, what)
    except BlockingIOError:
        return  # the pipe is full of hints already


def drain(pipe: int) -> bytes:
    """Empty a pipe of its hints."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""
