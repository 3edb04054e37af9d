"""What the dead leave in shared memory: torch makes a file there to hand a tensor to another process, and unlinks it at once.

A process that is killed between the two, such as a worker of a data loader, leaves the file behind.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from instep.agent import procfs

_FOLDER = "/dev/shm"  # noqa: S108 - the folder that shm_open uses
_NAME = re.compile(r"torch_(\d+)_")
_LOOK = 0.005


class Remains:
    """Those who are about to be killed, until they are dead and what they left is removed."""

    def __init__(self) -> None:
        self.dying: set[int] = set()

    def note(self, leader: int, *, but: int | None = None) -> None:
        """All members of the process group that ``leader`` leads will be killed, ``but`` one."""
        self.dying |= {leader, *_members(leader)} - {but}

    def clear(self, *, seconds: float = 0.0) -> None:
        """Remove what those who are dead left; wait up to ``seconds`` for the others, and keep them in mind for the next time."""
        until = time.monotonic() + seconds
        while self.dying:
            dead = {pid for pid in self.dying if procfs.dead(pid)}
            _remove(dead)
            self.dying -= dead
            if time.monotonic() >= until:
                return
            time.sleep(_LOOK)


def end_own_group(seconds: float) -> None:
    """Kill the process group that this process leads, itself at last; does not return. Waits up to ``seconds`` for the others."""
    own, remains = os.getpid(), Remains()
    remains.note(own, but=own)
    for pid in remains.dying:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    remains.clear(seconds=seconds)
    os.killpg(own, signal.SIGKILL)


def _members(leader: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(ProcessLookupError):
                if os.getpgid(int(name)) == leader:
                    yield int(name)


def _remove(pids: set[int]) -> None:
    if not pids:
        return
    with suppress(FileNotFoundError):
        for name in os.listdir(_FOLDER):
            if (found := _NAME.match(name)) and int(found[1]) in pids:
                with suppress(OSError):
                    os.unlink(os.path.join(_FOLDER, name))
