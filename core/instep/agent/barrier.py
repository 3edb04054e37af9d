"""A barrier between the ranks of one machine, in memory that they share: no message is sent, and nobody is woken but the waiters.

Each rank has one word in each of three rows. In the first two: its newest barrier there, as incarnation, number within the incarnation,
and a code that all ranks are to agree on. Barriers alternate between them, since a rank may be one barrier ahead of another one, but never
two. In the third: the newest barrier that it has passed. A rank that is cut in a barrier may stay behind it although others have passed;
a rank that has told that it passed does not.
The last rank to arrive rings the bell of the row (an eventfd) once for each other rank. A bell is a hint, the words are the truth: a
rank that was cut leaves its word and its rings behind, and neither means anything to a later incarnation. Imports no torch.
"""

import mmap
import os
import select
import struct
import time
from contextlib import suppress
from typing import NamedTuple

_WORD = struct.Struct("<q")
_CODE_BITS, _NUMBER_BITS, _INCARNATION_BITS = 7, 40, 16
_ROWS, _PASSED = 3, 2
_LOOK = 0.0005
CODES = 1 << _CODE_BITS
"""Codes are smaller than this."""


class BarrierFds(NamedTuple):
    """The memory file, and the bells of both rows."""

    page: int
    even: int
    odd: int


def create(size: int) -> BarrierFds:
    """A new barrier for ``size`` ranks, where nobody has arrived; the caller owns the file descriptors."""
    page = os.memfd_create("instep-barrier", os.MFD_CLOEXEC)
    os.posix_fallocate(page, 0, _ROWS * size * _WORD.size)
    bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE) for _ in range(2)]
    return BarrierFds(page, *bells)


class NodeBarrier:
    """One rank's side of the barrier."""

    def __init__(self, fds: BarrierFds, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._row = struct.Struct(f"<{size}q")
        self._map = mmap.mmap(fds.page, _ROWS * self._row.size)
        self._bells, self._rings = (fds.even, fds.odd), (select.poll(), select.poll())
        for bell, rings in zip(self._bells, self._rings, strict=True):
            rings.register(bell, select.POLLIN)
        self._incarnation = self._number = self._mine = 0

    def arrive(self, incarnation: int, code: int) -> None:
        """Tell the others that this rank is there. Every rank must have arrived and seen that before anyone arrives again."""
        if incarnation != self._incarnation:
            self._incarnation, self._number = incarnation, 0
        self._number += 1
        place = incarnation % (1 << _INCARNATION_BITS) << _NUMBER_BITS | self._number % (1 << _NUMBER_BITS)
        self._mine = place << _CODE_BITS | code
        _WORD.pack_into(self._map, self._start + self._rank * _WORD.size, self._mine)
        if self._complete():
            os.eventfd_write(self._bell, self._size - 1)

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have arrived; waits up to ``seconds`` for them."""
        if self._complete():
            return True
        if self._rings[self._number % 2].poll(1e3 * seconds):
            with suppress(BlockingIOError):  # another rank was faster
                os.eventfd_read(self._bell)
        return self._complete()

    def agreed(self) -> bool:
        """Whether all ranks arrived with the same code; call it after ``wait`` returned true, before the next ``arrive``."""
        return self._words() == (self._mine,) * self._size

    def passed(self) -> None:
        """Tell the others that this rank goes on from the last barrier."""
        _WORD.pack_into(self._map, _PASSED * self._row.size + self._rank * _WORD.size, self._mine >> _CODE_BITS)

    def behind(self, incarnation: int, seconds: float) -> bool:
        """Whether all ranks have passed the last barrier of ``incarnation`` that this rank did; waits up to ``seconds``."""
        if incarnation != self._incarnation or not self._number:
            return True
        deadline = time.monotonic() + seconds
        while self._row.unpack_from(self._map, _PASSED * self._row.size) != (self._mine >> _CODE_BITS,) * self._size:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK)
        return True

    @property
    def _bell(self) -> int:
        return self._bells[self._number % 2]

    @property
    def _start(self) -> int:
        return self._number % 2 * self._row.size

    def _words(self) -> tuple[int, ...]:
        return self._row.unpack_from(self._map, self._start)

    def _complete(self) -> bool:
        words = self._words()
        place = self._mine >> _CODE_BITS
        return words == (self._mine,) * self._size or all(word >> _CODE_BITS == place for word in words)
