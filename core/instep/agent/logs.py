"""The output of the ranks: files that the workers write themselves, so that a paused agent never blocks a printing rank."""

import ctypes
import os
import tempfile
from pathlib import Path

from instep.errors import ConfigError

_CHUNK = 1 << 18
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PUNCH_AFTER = 1 << 24
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


class Logs:
    """One file a rank, appended to by all its births: ``DIR/rank-N.log``, or without a directory a file that has no name."""

    def __init__(self, directory: str | None, ranks: int) -> None:
        self._directory = None if directory is None else Path(directory)
        self._fds: list[int] = []
        try:
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
            self._fds += [self._open(rank) for rank in range(ranks)]
        except OSError as error:
            raise ConfigError(f"cannot write logs to {directory or tempfile.gettempdir()}: {error.strerror}") from error
        self._at = [os.fstat(fd).st_size for fd in self._fds]
        self._punched = list(self._at)

    def fd(self, rank: int) -> int:
        """The open file of a rank."""
        return self._fds[rank]

    def path(self, rank: int) -> Path | None:
        """Where a person finds the file, if it has a name."""
        return None if self._directory is None else self._directory / f"rank-{rank}.log"

    def read(self, rank: int) -> bytes:
        """What the rank has written since the last call, at most 256 KiB."""
        data = os.pread(self._fds[rank], _CHUNK, self._at[rank])
        self._at[rank] += len(data)
        if self._directory is None and self._at[rank] - self._punched[rank] > _PUNCH_AFTER:
            self._punch(rank)
        return data

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _open(self, rank: int) -> int:
        if (path := self.path(rank)) is not None:
            return os.open(path, _FLAGS | os.O_CREAT, 0o644)
        fd, name = tempfile.mkstemp(prefix="instep-log-")
        os.close(fd)
        try:
            return os.open(name, _FLAGS)
        finally:
            os.unlink(name)

    def _punch(self, rank: int) -> None:
        """Free the blocks of a nameless file that were shown already, so that a long job does not fill the disk."""
        start, length = self._punched[rank], self._at[rank] - self._punched[rank]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate(self._fds[rank], _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(length))
        self._punched[rank] = self._at[rank]
