"""What /proc says about processes, for tests that count them."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def parent(pid: int) -> int | None:
    """The parent's id, ``None`` once the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def state(pid: int) -> str | None:
    """The letter of the process state (Z for a zombie), ``None`` once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(root: int) -> set[int]:
    """All living descendants of a process."""
    parents = {int(p.name): parent(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found, fresh = set[int](), {root}
    while fresh:
        fresh = {pid for pid, its in parents.items() if its in fresh} - found
        found |= fresh
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    return {pid for pid in pids if state(pid) not in (None, "Z")}


def command(pid: int) -> str:
    """The name that ps and top show."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening(pids: set[int]) -> Iterator[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket on which one of the processes listens."""
    inodes: dict[str, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                host, port = fields[1].split(":")
                inodes[fields[9]] = (_address(host), int(port, 16))
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except FileNotFoundError:
                continue
            if (match := re.fullmatch(r"socket:\[(\d+)\]", target)) and match[1] in inodes:
                yield pid, *inodes[match[1]]


def _address(text: str) -> str:
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    if len(words) == 1:
        return ".".join(map(str, words[0]))
    raw = b"".join(words)
    return "::1" if raw == bytes(15) + b"\1" else raw.hex(":", 2)


def wait_for(ready: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll until ``ready``; fails the test after ``seconds``."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def end(pids: set[int]) -> None:
    """Kill what a failed test has left."""
    for pid in alive(pids):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
