"""Where old communicators rest: their destructor joins threads, so they are dropped off the main path, after their operations."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instep.hooks import Communicator
from instep.torch.works import FailableWork

_ROUND = 0.2


@dataclass
class _Grave:
    communicators: list[Communicator]
    ended: list[Callable[[], bool]]
    works: list[FailableWork]


class Graveyard:
    """Keeps communicators and works alive until nothing uses them any more; a thread exists only while there is something to do."""

    def __init__(self) -> None:
        self._graves: list[_Grave] = []
        self._lock = threading.Lock()
        self._reaper: threading.Thread | None = None
        self._closed = False

    def close(self, seconds: float) -> None:
        """Stop dropping: a thread that is inside a destructor when the interpreter ends would abort the process."""
        self._closed = True
        reaper = self._reaper
        if reaper is not None:
            reaper.join(seconds)
        with self._lock:
            for grave in self._graves:
                # Kept for ever: gloo's destructor waits for operations that it has lost until they time out.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave))

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, communicators: Sequence[Communicator], works: Sequence[FailableWork]) -> None:
        """Take over communicators and their unfinished works."""
        grave = _Grave(list(communicators), [c.abandon() for c in communicators], list(works))
        with self._lock:
            self._graves.append(grave)
            if self._reaper is None:
                self._reaper = threading.Thread(target=self._reap, name="instep-graveyard", daemon=True)
                self._reaper.start()

    def _reap(self) -> None:
        while not self._closed:
            time.sleep(_ROUND)
            with self._lock:
                over = [g for g in self._graves if all(w.ended() for w in g.works) and all(e() for e in g.ended)]
                self._graves = [g for g in self._graves if g not in over]
            # Dropped here, outside the lock: a destructor joins its group's threads.
            over.clear()
            with self._lock:
                if not self._graves:
                    self._reaper = None
                    return
