"""The directories of the cache: one per user, run and stream, private to the user; every file is opened relative to them, without links.

Below the top directory: ``<run>/<stream>`` with ``lock`` (held by the producer as long as it lives), ``producer`` (who that is),
``reader-K`` (where each reader stands, and who it is; locked as long as it lives), ``wake`` and ``wake-K`` (pipes to wake the producer
and each reader), ``seek-K`` (the state of a stateful source), ``r-EPOCH-SAMPLE`` (records) and ``free-N`` (files to be recycled).
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from instep_mmap_loader.errors import LoaderError, NoRoom

LOCK, PRODUCER, WAKE = "lock", "producer", "wake"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - each directory below it is private and checked
_TRIES = 20
_PATIENCE = 10.0
_NOTE = 4096


class Folder:
    """An open directory of one stream."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    @classmethod
    def make(cls, path: Path) -> Self:
        """Make or open ``top/run/stream``, each private. Raises ``LoaderError`` if one of them belongs to or is open to others."""
        for _ in range(_TRIES):
            try:
                for part in (path.parent.parent, path.parent, path):
                    with contextlib.suppress(FileExistsError):
                        part.mkdir(mode=0o700)
                    fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    _private(part, os.fstat(fd), fd)
                    if part != path:
                        os.close(fd)
            except FileNotFoundError:
                continue  # another process cleaned up meanwhile
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoom(f"no room for {part}: {error.strerror}") from error
                raise LoaderError(f"the cache's directory {part} cannot be used: {error.strerror}; remove it") from error
            return cls(path, fd)
        raise LoaderError(f"the cache's directory {path} disappears whenever it is made; choose another one with directory=")

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Open a directory that exists, ``None`` if it does not."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        _private(path, os.fstat(fd), fd)
        return cls(path, fd)

    @property
    def there(self) -> bool:
        """Whether it is still linked in the file system."""
        return os.fstat(self.fd).st_nlink > 0

    def open(self, name: str, flags: int) -> int:
        """Open a file of this directory. Raises ``LoaderError`` for a link, or a file that belongs to somebody else."""
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise LoaderError(f"{self.path / name} is a symbolic link: somebody tampered with the cache; remove {self.path}") from error
            raise
        if os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            raise LoaderError(f"{self.path / name} belongs to another user; remove {self.path}")
        return fd

    def pipe(self, name: str) -> int:
        """Open a named pipe for both ends, without blocking; it is made if it is not there."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(name, 0o600, dir_fd=self.fd)
        fd = self.open(name, os.O_RDWR | os.O_NONBLOCK)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise LoaderError(f"{self.path / name} is no pipe; remove {self.path}")
        return fd

    @contextlib.contextmanager
    def exclusive(self, *, seconds: float = _PATIENCE) -> Iterator[None]:
        """For a moment, no other process claims anything here. Raises ``LoaderError`` if one holds on to it for so long."""
        until = time.monotonic() + seconds
        while not locked(self.fd):
            if time.monotonic() > until:
                raise LoaderError(f"a process that uses {self.path} is stopped while it claims it; end that process (fuser {self.path})")
            time.sleep(0.002)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def lock(self) -> int | None:
        """Become the producer's parent: the file descriptor of its lock, or ``None`` while a producer lives."""
        fd = self.open(LOCK, os.O_RDWR | os.O_CREAT)
        if locked(fd):
            return fd
        os.close(fd)
        return None

    def note(self, name: str, content: Mapping[str, object]) -> None:
        """Write a small JSON file in place; its only page is allocated when it is first written."""
        data = json.dumps(content).encode()
        fd = self.open(name, os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(fd, data[:_NOTE].ljust(_NOTE), 0)
        finally:
            os.close(fd)

    def reserve(self, name: str) -> None:
        """Make sure that such a file can be written later. Raises ``NoRoom``."""
        fd = self.open(name, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, _NOTE)
        except OSError as error:
            raise NoRoom(f"no room for {self.path / name}: {error.strerror}") from error
        finally:
            os.close(fd)

    def noted(self, name: str) -> dict[str, object]:
        """What such a file holds, nothing if it is missing or damaged."""
        try:
            fd = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return {}
        try:
            tree = json.loads(os.pread(fd, _NOTE, 0) or b"{}")
        except ValueError:
            return {}
        finally:
            os.close(fd)
        return tree if isinstance(tree, dict) else {}

    def regular(self, name: str) -> bool:
        """Whether a name is a file of this user's, and no link."""
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()

    def names(self) -> list[str]:
        """All files."""
        return os.listdir(self.fd)

    def readers(self) -> list[bool]:
        """For each reader that did not leave, whether it lives. Called inside ``exclusive``: looking at a lock takes it for a moment."""
        return [self.held(name) for name in self.names() if name.startswith("reader-") and self.noted(name)]

    def held(self, name: str) -> bool:
        """Whether a living process has locked a file."""
        try:
            fd = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return False
        free = locked(fd)
        os.close(fd)
        return not free

    def remove(self) -> None:
        """Remove the directory, and those above it if they are empty now."""
        if self.there:
            shutil.rmtree(self.path, ignore_errors=True)
        _prune(self.path.parent)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def locked(fd: int) -> bool:
    """Lock an open file until it is closed, unless another process has. The kernel ends the lock with its process, in any pid namespace."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def top(directory: str) -> Path:
    """This user's directory."""
    return Path(directory) / f"instep-mmap-{os.getuid()}"


def sweep(directory: str, *, own: str) -> list[str]:
    """Remove the runs that no living process belongs to, except ``own``; their names."""
    base = top(directory)
    if not base.is_dir() or base.is_symlink() or base.stat().st_uid != os.getuid():
        return []
    gone = []
    for run in base.iterdir():
        if run.name != own and run.is_dir() and not run.is_symlink() and _dead(run):
            shutil.rmtree(run, ignore_errors=True)
            gone.append(run.name)
    _prune(base / own)
    return gone


def _dead(run: Path) -> bool:
    for path in run.iterdir():
        if not path.is_dir():
            continue
        folder = Folder.find(path)
        if folder is None:
            continue
        try:
            with folder.exclusive(seconds=0):
                if folder.held(LOCK) or any(folder.readers()):
                    return False
        except LoaderError:
            return False  # somebody is claiming it
        finally:
            folder.close()
    return True


def _prune(run: Path) -> None:
    for path in (run, run.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def _private(path: Path, status: os.stat_result, fd: int) -> None:
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(fd)
        whose = "belongs to another user" if status.st_uid != os.getuid() else f"is open to others (mode {stat.S_IMODE(status.st_mode):o})"
        raise LoaderError(f"the cache's directory {path} {whose}: it is not to be trusted; remove it, or choose another with directory=")
