"""What a process holds: threads, open files, child processes, and the files in shared memory that it made."""

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from instep.agent import procfs

SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - not a temporary file: the place itself
_LOOKS = 100
"""Looks, a fiftieth of a second apart, until what was told to end must have ended. On a busy machine they stretch, seconds would not."""

Census = Mapping[str, list[str]]


class Shm:
    """Watches which files in shared memory this process and its descendants make, whoever else makes some at the same time."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._before = set(_listing())
        sys.addaudithook(self._audit)

    def look(self) -> None:
        """Take note of what is open or mapped now: files made by native code are in no audit event."""
        for pid in [os.getpid(), *_descendants(os.getpid())]:
            with suppress(OSError):
                self._take(
                    line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if SHARED_MEMORY in line
                )
            with suppress(OSError):
                self._take(_links(pid))

    def left(self) -> list[str]:
        """Files that were made here and still exist."""
        there = set(_listing())
        return sorted(name for name in self._seen & there if name not in self._before)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            self._take([arguments[0]])
        elif event == "mmap.__new__" and isinstance(arguments[0], int) and arguments[0] >= 0:
            with suppress(OSError):
                self._take([os.readlink(f"/proc/self/fd/{arguments[0]}")])

    def _take(self, paths: Iterable[str]) -> None:
        self._seen.update(path for path in paths if path.startswith(SHARED_MEMORY))


def census() -> Census:
    """Names of all threads of Python, number of native ones, targets of open files, and commands of child processes."""
    gc.collect()
    return {
        "thread": [f"{t.name} ({_target(t)})" for t in threading.enumerate() if t is not threading.main_thread()],
        "native thread": procfs.threads(os.getpid()),
        "file": sorted(_links(os.getpid())),
        "process": [_command(pid) for pid in _descendants(os.getpid())],
    }


def settled(before: Census) -> Census:
    """A census, once nothing that is not in ``before`` is about to end, or it has looked often enough."""
    now = census()
    for _ in range(_LOOKS):
        if all(len(now[kind]) <= len(before[kind]) for kind in now):
            break
        time.sleep(0.02)
        now = census()
    return now


def more(before: Census, after: Census, kind: str) -> list[str]:
    """What ``after`` has more of than ``before``."""
    left = list(before[kind])
    out = []
    for item in after[kind]:
        if item in left:
            left.remove(item)
        else:
            out.append(item)
    return out


def _target(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    return getattr(target, "__qualname__", type(thread).__qualname__)


def _links(pid: int) -> list[str]:
    out = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            # The number behind a socket or pipe is another one each time.
            out.append(re.sub(r":\[\d+\]", "", os.readlink(f"/proc/{pid}/fd/{fd}")))
    return out


def _listing() -> list[str]:
    root = Path(SHARED_MEMORY)
    return [str(path) for path in root.rglob("*")] if root.is_dir() else []


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task") if Path(f"/proc/{pid}/task").exists() else ():
        with suppress(OSError):
            found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found + [below for child in found for below in _descendants(child)]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or f"process {pid}"
    return f"process {pid}"
