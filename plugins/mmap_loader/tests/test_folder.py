"""What must not be trusted is refused, and what is left of dead runs is removed."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from things import Samples, filled, take

from instep.errors import UsageError
from instep_mmap_loader import MmapLoader
from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.folder import Folder, sweep, top
from instep_mmap_loader.room import room

Make = Callable[..., MmapLoader]
pytestmark = pytest.mark.timeout(180)


def test_everything_is_private(make: Make, tmp_path: Path) -> None:
    loader = make(Samples(), num_workers=2)
    filled(loader, 8)  # all that it may: it rests, and renames nothing
    paths = [top(str(tmp_path)), *top(str(tmp_path)).rglob("*")]
    assert len(paths) > 8
    for path in paths:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_directory_open_to_others_is_refused(make: Make, tmp_path: Path, level: int, mode: int) -> None:
    path = top(str(tmp_path)) / "run" / "words.0"
    Folder.make(path).close()
    opened = [path.parent.parent, path.parent, path][level]
    opened.chmod(mode)
    with pytest.raises(LoaderError, match=rf"{opened} is open to others"):
        Folder.make(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(make: Make, tmp_path: Path) -> None:
    base = top(str(tmp_path))
    base.mkdir(mode=0o700)
    os.chown(base, 12345, -1)
    with pytest.raises(LoaderError, match="belongs to another user"):
        make(Samples())


def test_a_link_instead_of_a_directory_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    top(str(tmp_path)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoaderError, match="cannot be used"):
        make(Samples())


def test_a_link_instead_of_a_record_is_refused(make: Make, tmp_path: Path) -> None:
    loader = make(Samples(), prefetch=4)
    filled(loader, 4)
    assert loader._cache is not None
    record = loader._cache.path / "r-0-8"
    record.rename(tmp_path / "stolen")
    record.symlink_to(tmp_path / "stolen")
    take(loader, 2)
    with pytest.raises(LoaderError, match=r"r-0-8 is a symbolic link"):
        loader.following()


def test_capacity_is_checked_at_the_start(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"capacity=\d+ bytes, but .* leave \d+"):
        make(Samples(), capacity=room(tmp_path) + (1 << 30))


@pytest.mark.full
def test_capacity_bounds_the_pool(make: Make, tmp_path: Path) -> None:
    """Half of the files that it would like fit; the stream is the same."""
    capacity = 7 << 16
    loader = make(Samples(), capacity=capacity, shuffle=True)
    filled(loader, 2)
    got = take(loader)
    assert loader._cache is not None
    sizes = {
        entry.inode(): entry.stat().st_size for entry in os.scandir(loader._cache._folder.fd) if entry.name.startswith(("r-", "free-"))
    }
    assert 0 < sum(sizes.values()) <= capacity
    assert got == take(make(Samples(), cache=False, shuffle=True))


def test_dead_runs_are_swept_and_living_ones_are_not(make: Make, tmp_path: Path) -> None:
    living = make(Samples())
    assert living._cache is not None
    dead = top(str(tmp_path)) / "run-dead" / "loader-0.0"
    Folder.make(dead).close()
    (dead / "r-0-0").write_bytes(b"batch")
    assert sweep(str(tmp_path), own="none") == ["run-dead"]
    assert not dead.exists()
    assert living._cache.path.exists()


def test_a_process_that_stops_while_it_claims_holds_nobody_up(tmp_path: Path) -> None:
    path = top(str(tmp_path)) / "run" / "words.0"
    one, other = Folder.make(path), Folder.make(path)
    with one.exclusive(), pytest.raises(LoaderError, match="is stopped while it claims it"), other.exclusive(seconds=0.05):
        raise AssertionError("both have it")
    with other.exclusive(seconds=0):
        pass
    for folder in (one, other):
        folder.close()
