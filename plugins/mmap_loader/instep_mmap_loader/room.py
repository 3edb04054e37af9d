"""How much shared memory there is to take: what the file system has left, and what the cgroup allows."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def room(directory: str | Path) -> int:
    """Bytes that may be allocated below ``directory``: beyond them lies a full file system, or the kernel's out-of-memory killer."""
    status = os.statvfs(directory)
    return min(status.f_bavail * status.f_frsize, *_headrooms(), _UNLIMITED)


def _headrooms() -> Iterator[int]:
    """What each memory cgroup above this process has left."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield max(0, limit - used)
            if folder == root:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
