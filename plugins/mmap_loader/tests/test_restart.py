"""The trainer is killed, alone or with its producer: the next one goes on with the very next batch, which lies ready."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from things import Counting, Plain, Samples, running, take, wait_for

from instep_mmap_loader import MmapLoader
from instep_mmap_loader.folder import Folder, top

Make = Callable[..., MmapLoader]
FULL = pytest.mark.full
OPTIONS = {"prefetch": 6, "lookback": 2}


class Trainers:
    """Starts one trainer after the other on the same stream."""

    def __init__(self, out: Path, dataset: str, **told: object) -> None:
        self.out = out
        self.told = {"dataset": dataset, "options": OPTIONS, "die": [], "with_producer": False, "pace": 0.0, **told}

    def start(self, **changes: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(self.out), json.dumps({**self.told, **changes})]
        return subprocess.Popen(command)

    def run(self, **changes: object) -> int:
        return self.start(**changes).wait(60)

    def digests(self) -> list[str]:
        return (self.out / "digests").read_text().split()

    def producers(self) -> list[int]:
        found = []
        for path in top(str(self.out)).glob("*/*/producer"):
            pid = json.loads(path.read_text()).get("pid")
            found += [pid] if running(pid) else []
        return found

    def nothing_left(self, *, seconds: float) -> None:
        wait_for(lambda: not top(str(self.out)).exists(), seconds=seconds, what="an empty directory")


def _unlocked(path: Path) -> bool:
    folder = Folder.find(path)
    if folder is None:
        return True
    lock = folder.lock()
    folder.close()
    if lock is not None:
        os.close(lock)
    return lock is not None


@pytest.mark.parametrize(
    ("dataset", "with_producer"),
    [
        ("samples", True),
        pytest.param("samples", False, marks=FULL),
        pytest.param("counting", True, marks=FULL),
        pytest.param("counting", False, marks=FULL),
    ],
)
def test_killed_twice_in_a_row(make: Make, tmp_path: Path, dataset: str, with_producer: bool) -> None:
    kind = {"samples": Samples, "counting": Counting, "plain": Plain}[dataset]
    options = {"shuffle": True, **OPTIONS} if dataset == "samples" else OPTIONS
    expected = take(make(kind(), cache=False, **options))
    trainers = Trainers(tmp_path, dataset, options=options, with_producer=with_producer, die=[5, 6], pace=0.05)
    assert trainers.run() == -signal.SIGKILL
    assert len(trainers.producers()) == int(not with_producer)
    before = trainers.producers()
    assert trainers.run() == -signal.SIGKILL
    assert float((tmp_path / "first").read_text()) < 0.02
    assert trainers.producers() == before
    assert trainers.run() == 0
    assert trainers.digests() == expected
    trainers.nothing_left(seconds=1)


@pytest.mark.full
def test_a_source_without_a_state_is_fast_forwarded(make: Make, tmp_path: Path) -> None:
    expected = take(make(Plain(), cache=False))
    trainers = Trainers(tmp_path, "plain", with_producer=True, die=[7])
    assert trainers.run() == -signal.SIGKILL
    assert trainers.run() == 0
    assert trainers.digests() == expected


def test_nobody_comes_back(tmp_path: Path) -> None:
    """After its patience the producer removes everything, and ends with its workers."""
    trainers = Trainers(tmp_path, "samples", die=[3], options={**OPTIONS, "idle": 0.5, "num_workers": 2})
    assert trainers.run() == -signal.SIGKILL
    (pid,) = trainers.producers()
    group = os.getpgid(pid)
    trainers.nothing_left(seconds=5)
    wait_for(lambda: not _members(group), seconds=2, what="the end of all its processes")


def test_what_a_kill_of_everything_leaves_is_reclaimed(make: Make, tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, "samples", die=[3], with_producer=True)
    assert trainers.run() == -signal.SIGKILL
    assert list(top(str(tmp_path)).glob("*/*/r-*"))
    # The trainer was waited for; the producer, killed with it, holds its lock until the kernel is through with it.
    wait_for(lambda: all(map(_unlocked, top(str(tmp_path)).glob("*/*"))), seconds=10, what="the end of the killed producer")
    make(Samples(), run="another").close()
    trainers.nothing_left(seconds=1)


def test_an_uncaught_exception_keeps_the_batches_and_a_clean_end_removes_them(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from things import *\n"
    script += f"loader = MmapLoader(Samples(), 4, directory={str(tmp_path)!r}, run='x', idle=2.0)\ntake(loader, 3)\n"
    assert subprocess.run([sys.executable, "-c", script + "raise OSError('gone')"], stderr=subprocess.DEVNULL, timeout=60).returncode == 1
    assert list(top(str(tmp_path)).glob("*/*/r-*"))
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
    assert not top(str(tmp_path)).exists()


@pytest.mark.parametrize("size", ["200k", pytest.param("1000k", marks=FULL)])
def test_a_full_file_system_costs_time_only(make: Make, tmp_path: Path, size: str) -> None:
    """A tmpfs in a namespace of its own has room for nothing, or for a few batches."""
    mount = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*mount, f"mount -t tmpfs none {tmp_path}"], stderr=subprocess.DEVNULL, timeout=30).returncode:
        pytest.skip("no right to mount a tmpfs")
    expected = take(make(Samples(), cache=False, shuffle=True))
    folder = tmp_path / "small"
    folder.mkdir()
    told = json.dumps({**Trainers(folder, "samples").told, "options": {"shuffle": True, **OPTIONS}})
    trainer = f"{sys.executable} {Path(__file__).with_name('trainer.py')} {folder} '{told}'"
    script = f"mount -t tmpfs -o size={size} none {folder} && {trainer} && cp {folder}/digests {tmp_path}/digests"
    assert subprocess.run([*mount, script], timeout=60).returncode == 0
    assert (tmp_path / "digests").read_text().split() == expected


def _members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and running(int(path.name)):
            try:
                found += [int(path.name)] if os.getpgid(int(path.name)) == group else []
            except ProcessLookupError:
                continue
    return found
