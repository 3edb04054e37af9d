"""A worker's record: the anonymous memory file that outlives it and holds its progress and private state.

Layout: one header page of progress words, which the agent reads at its ticks, then three slots, of which each step has one, each a
page of slot header followed by the payload. The file is a memfd: it has no name, so nothing can be left behind. Imports no torch.
Three, since a rank that has recorded s+2 before a barrier may have to go back to s (see ``plan``).
"""

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from instep.errors import InstepError

PAGE = 4096
_WORDS = ("state", "block", "step", "collectives", "deliveries", "frame", "beat", "waiting", "sequence", "joined")
_AT = {word: 8 * i for i, word in enumerate(_WORDS)}
_WORD = struct.Struct("<q")
_SLOT = struct.Struct("<qQIQ")
_SIZES = struct.Struct("<QQ")
_SIZES_AT, _TEXT_AT = 1024, 2048
_ALIGN = 64
SLOTS = 3
"""Steps whose private state a record holds. ``instep.torch.buffers`` has as many marks."""


class State(IntEnum):
    """Where a worker's main thread stands."""

    BORN = 0
    SETUP = 1
    STEP = 2
    COMMIT = 3
    BODY = 4
    RECOVERY = 5
    DONE = 6
    OUTSIDE = 7
    ENDED = 8


@dataclass(frozen=True)
class Progress:
    """One reading of the header. ``waiting`` is 1 while main waits for peers; ``joined`` the last joined incarnation, -1 for none.

    ``step`` counts committed steps, ``beat`` the control thread's rounds, ``frame`` identifies main's Python instruction.
    """

    state: State
    block: int
    step: int
    collectives: int
    deliveries: int
    frame: int
    beat: int
    waiting: int
    sequence: int
    joined: int
    operation: str
    """"GROUP OPERATION" of the collective that main waits in, or the phase of a recovery."""


def create(name: str) -> int:
    """A new record with an empty header; the caller owns the file descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    _grow(fd, PAGE)
    return fd


def read(fd: int) -> Progress:
    """The present progress, as the agent sees it."""
    page = os.pread(fd, PAGE, 0)
    values = [_WORD.unpack_from(page, 8 * i)[0] for i in range(len(_WORDS))]
    text = page[_TEXT_AT : _TEXT_AT + 128].split(b"\0", 1)[0].decode(errors="replace")
    words = dict(zip(_WORDS, values, strict=True))
    return Progress(state=State(words.pop("state")), **words, operation=text)


def _grow(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise InstepError(
            f"cannot reserve {size} bytes of memory for a record of private state: {error.strerror}; "
            "raise the memory limit of the job, or keep large buffers that never change out of private state"
        ) from error


class Header:
    """The worker's side of the header: plain stores into the mapped page."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE)

    def put(self, word: str, value: int) -> None:
        """Store one progress word by name."""
        _WORD.pack_into(self._map, _AT[word], value)

    def get(self, word: str) -> int:
        """Read one progress word by name."""
        return int(_WORD.unpack_from(self._map, _AT[word])[0])

    def operation(self, text: str) -> None:
        """Name what main waits in, at most 127 bytes."""
        raw = text.encode()[:127]
        self._map[_TEXT_AT : _TEXT_AT + len(raw) + 1] = raw + b"\0"

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()


class Slots:
    """Crash-safe slots of private state, one for each of the last steps: ``meta`` bytes and a fixed region of ``flat`` bytes."""

    def __init__(self, fd: int, *, meta: int, flat: int) -> None:
        """Reserve room for ``meta`` and ``flat`` bytes in each slot. Raises ``InstepError`` when memory is short.

        The first birth of a rank decides on ``meta``: later ones must find its slots, whatever they hold when they get here.
        """
        there, there_flat = _SIZES.unpack(os.pread(fd, _SIZES.size, _SIZES_AT))
        self._meta, self._flat = there if there and there_flat == flat else -(-meta // _ALIGN) * _ALIGN, flat
        self._size = PAGE + -(-(self._meta + flat) // PAGE) * PAGE
        total = PAGE + SLOTS * self._size
        if os.fstat(fd).st_size < total:
            _grow(fd, total)
        if not there:
            os.pwrite(fd, _SIZES.pack(self._meta, flat), _SIZES_AT)
        self._map = mmap.mmap(fd, total)
        self._held: list[bytes | None] = [None] * SLOTS
        self._summed, self._sum = b"", zlib.crc32(b"")

    def flat(self, step: int) -> memoryview:
        """The flat region of the slot that belongs to ``step``."""
        start = self._at(step) + PAGE + self._meta
        return memoryview(self._map)[start : start + self._flat]

    def begin(self, step: int) -> None:
        """Mark the slot invalid before its flat region is changed."""
        _SLOT.pack_into(self._map, self._at(step), -1, 0, 0, 0)

    def end(self, step: int, meta: bytes, layout: int) -> None:
        """Store ``meta`` and make the slot valid for ``step``, its number last. ``layout`` identifies the flat region's shape.

        The very object that the slot holds, or that was stored last, costs neither a copy nor a checksum.
        """
        if len(meta) > self._meta:
            raise InstepError(
                f"private state needs {len(meta)} bytes, {self._meta} were reserved at the first block; private objects must not grow"
            )
        at = self._at(step)
        if meta is not self._held[step % SLOTS]:
            self._held[step % SLOTS] = None
            self._map[at + PAGE : at + PAGE + len(meta)] = meta
            self._held[step % SLOTS] = meta
        if meta is not self._summed:
            self._summed, self._sum = meta, zlib.crc32(meta)
        _SLOT.pack_into(self._map, at, -1, layout, self._sum, len(meta))
        _WORD.pack_into(self._map, at, step)

    def load(self, step: int, layout: int) -> bytes | None:
        """The ``meta`` of ``step``, or ``None`` when the slot holds another step, layout, or a broken payload."""
        at = self._at(step)
        have, have_layout, crc, length = _SLOT.unpack_from(self._map, at)
        if have != step or have_layout != layout or length > self._meta:
            return None
        meta = bytes(self._map[at + PAGE : at + PAGE + length])
        return meta if zlib.crc32(meta) == crc else None

    def _at(self, step: int) -> int:
        return PAGE + (step % SLOTS) * self._size
