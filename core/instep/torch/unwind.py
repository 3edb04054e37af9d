"""Unwinding the main thread: where an interruption may land, and the last resort of a real-time signal.

Interruptions land at collectives, at commit and at loader delivery. A main thread that reaches none of them for longer than a median
step gets a signal whose handler raises, if ``guarded`` called the interrupted code without instep in between, outside library sections.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType

import instep
from instep.board import Board
from instep.errors import Interrupted

_HOME = os.path.dirname(os.path.abspath(instep.__file__)) + os.sep
_SCRIPTS = _HOME + "testing" + os.sep
_LOADERS = tuple(os.path.join(_HOME, "torch", f"{name}.py") for name in ("dataloader", "loaders", "passes", "sampling"))
"""They call the script's own code: datasets, samplers, loaders."""
_LEAST, _MOST = 0.02, 2.0


class Sections:
    """Sections of the main thread that must not be cut; they nest."""

    def __init__(self) -> None:
        self._masked = 0

    def library(self) -> "Sections":
        """For a ``with`` whose body must not be cut."""
        return self

    def __enter__(self) -> None:
        self.mask()

    def __exit__(self, *_: object) -> None:
        self.unmask()

    def mask(self) -> None:
        """Enter a section that must not be cut."""
        self._masked += 1

    def unmask(self) -> None:
        """Leave such a section."""
        self._masked -= 1


class Unwinder(Sections):
    """Decides when main may be interrupted."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self._signal = signal.SIGRTMIN + 5
        self._steps: deque[float] = deque(maxlen=25)
        self._last = 0.0
        self._main = threading.main_thread().ident or 0
        self._before = signal.signal(self._signal, self._interrupt)

    def close(self) -> None:
        """Give the signal back; one that is still on its way must not end the process."""
        signal.signal(self._signal, signal.SIG_IGN if self._before is signal.SIG_DFL else self._before)

    def reset(self) -> None:
        """Forget all sections, after main unwound to the block."""
        self._masked = 0
        self._last = 0.0

    def stepped(self) -> None:
        """Note that a step was committed, to know how long one takes."""
        now = time.monotonic()
        if self._last:
            self._steps.append(now - self._last)
        self._last = now

    def patience(self) -> float:
        """Seconds to wait for main to reach a collective by itself: a median step, within limits."""
        return min(max(median(self._steps), _LEAST), _MOST) if self._steps else _MOST / 4

    def insist(self) -> None:
        """Called while main has not acknowledged: signal it once it was given a median step of time."""
        if time.monotonic() - self._board.noticed > self.patience():
            signal.pthread_kill(self._main, self._signal)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        if self._masked or self._board.acknowledged >= self._board.target or not self._board.revoked or frame is None:
            return
        if not _own(frame) and _theirs(frame):
            raise Interrupted("by signal")


def guarded(call: Callable[[], object]) -> object:
    """Run the user's block; this frame marks everything above it as theirs."""
    return call()


def _own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_HOME) and not frame.f_code.co_filename.startswith(_SCRIPTS)


def _theirs(frame: FrameType | None) -> bool:
    """Whether the script called this, or one of its loaders: what instep calls (locks, messages, records) must not be cut."""
    while frame is not None:
        if frame.f_code is guarded.__code__:
            return True
        if _own(frame) and not frame.f_code.co_filename.startswith(_LOADERS):
            return False
        frame = frame.f_back
    return False
