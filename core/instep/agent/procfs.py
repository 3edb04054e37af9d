"""What /proc tells about a process. A process that is gone reads as nothing."""

import os
from pathlib import Path

from instep.agent.watchdog import Vitals

_STATE, _UTIME, _STIME, _EXIT_CODE = 0, 11, 12, 49

_IDLE = 20
"""Ticks of other threads that count as one, so that a control thread, which beats while main hangs, is no movement."""


def vitals(pid: int) -> Vitals:
    """CPU ticks of the main thread, its child processes and busy other threads, bytes of I/O, and whether the process is stopped."""
    main, whole = _stat(f"/proc/{pid}/task/{pid}/stat"), _stat(f"/proc/{pid}/stat")
    if main is None or whole is None:
        return Vitals()
    cpu = _cpu(main) + max(0, _cpu(whole) - _cpu(main)) // _IDLE
    cpu += sum(_cpu(stat) for child in children(pid) if (stat := _stat(f"/proc/{child}/stat")) is not None)
    return Vitals(cpu=cpu, io=_io(pid), stopped=main[_STATE] == "T")


def children(pid: int) -> list[int]:
    """Process ids of the children that the main thread started."""
    text = _read(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in text.split()]


def exit_code(pid: int) -> int | None:
    """How a dead process that its parent has not reaped yet ended, negative for a signal; ``None`` when nobody can tell."""
    stat = _stat(f"/proc/{pid}/stat")
    if stat is None or stat[_STATE] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(stat[_EXIT_CODE]))


def dead(pid: int) -> bool:
    """Whether the process is gone, or only waits for its parent to take note."""
    stat = _stat(f"/proc/{pid}/stat")
    return stat is None or stat[_STATE] in "ZX"


def threads(pid: int) -> list[str]:
    """Names of all threads of a process."""
    return [_read(f"/proc/{pid}/task/{task}/comm").strip() for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int)]


def _cpu(stat: list[str]) -> int:
    return int(stat[_UTIME]) + int(stat[_STIME])


def _io(pid: int) -> int:
    words = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    return int(words.get("rchar", 0)) + int(words.get("wchar", 0))


def _stat(path: str) -> list[str] | None:
    """The fields behind the command name, which may hold spaces and brackets itself."""
    text = _read(path)
    return text.rpartition(")")[2].split() if text else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
