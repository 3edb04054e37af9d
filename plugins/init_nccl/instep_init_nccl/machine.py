"""``Machine``: everything that is looked up in the system below this process, so that a directory can stand in for it in a test."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


def disk_space(path: Path) -> int | None:
    """Bytes of the file system at a path; ``None`` if there is none."""
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return told.f_frsize * told.f_blocks


@dataclass(frozen=True)
class Limit:
    """A soft limit; ``soft`` is ``None`` where there is none, or where it is unknown."""

    soft: int | None
    unknown: bool


@dataclass(frozen=True)
class Machine:
    """Files below ``root``, the environment that libraries would see, and the size of file systems.

    Paths are given and returned as the machine has them (``/dev/infiniband``), whatever ``root`` is.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    space: Callable[[Path], int | None] = disk_space

    def real(self, path: str | Path) -> Path:
        """Where the file of the machine lies for this process."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """The text of a file, stripped; ``None`` if it cannot be read."""
        try:
            return self.real(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Names in a folder that match a pattern, in order; none if there is no such folder."""
        return sorted(path.name for path in self.real(folder).glob(pattern))

    def exists(self, path: str | Path) -> bool:
        """Whether there is such a file."""
        return self.real(path).exists()

    def usable(self, path: str | Path) -> bool:
        """Whether this process may read and write a file."""
        return os.access(self.real(path), os.R_OK | os.W_OK)

    def first(self, folders: Iterable[str], *names: str) -> Path | None:
        """The first of some files, looked for in LD_LIBRARY_PATH and then in ``folders``, as the loader of libraries does."""
        searched = [folder for folder in self.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        for folder in [*searched, *folders]:
            for name in names:
                if self.exists(path := Path(folder, name)):
                    return path
        return None

    def limit(self, name: str) -> "Limit":
        """The soft limit of this process, as /proc/self/limits names it (``Max locked memory``)."""
        row = re.search(rf"^{re.escape(name)}\s+(\d+|unlimited)\s", self.text("/proc/self/limits") or "", re.MULTILINE)
        return Limit(soft=int(row[1]) if row and row[1].isdigit() else None, unknown=row is None)

    def size(self, folder: str) -> int | None:
        """Bytes of the file system that holds a folder; ``None`` if it cannot be told."""
        return self.space(self.real(folder))

    def found_in(self, path: str | Path, pattern: bytes) -> str | None:
        """The first group of a pattern in the bytes of a file."""
        try:
            match = re.search(pattern, self.real(path).read_bytes())
        except OSError:
            return None
        return match[1].decode() if match else None
