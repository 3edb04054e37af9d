"""The trainer is killed, alone or with its producer: the next one goes on with the very next batch, which lies ready."""

import itertools
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
pytestmark = pytest.mark.timeout(180)
OPTIONS = {"prefetch": 6, "lookback": 2}


class Trainers:
    """Starts one trainer after the other on the same stream."""

    def __init__(self, out: Path, dataset: str, **told: object) -> None:
        self.out = out
        self.told = {"dataset": dataset, "options": OPTIONS, "batch": 4, "who": "", "die": [], "with_producer": False, "pace": 0.0, **told}

    def start(self, **changes: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(self.out), json.dumps({**self.told, **changes})]
        return subprocess.Popen(command)

    def run(self, **changes: object) -> int:
        return self.start(**changes).wait(120)

    def digests(self) -> list[str]:
        return (self.out / f"digests{self.told['who']}").read_text().split()

    def producers(self) -> list[int]:
        found = []
        for path in top(str(self.out)).glob("*/*/producer"):
            pid = json.loads(path.read_text()).get("pid")
            found += [pid] if running(pid) else []
        return found

    def nothing_left(self) -> None:
        wait_for(lambda: not top(str(self.out)).exists(), what="an empty directory")


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
        ("samples", False),
        pytest.param("samples", True, marks=FULL),
        pytest.param("counting", True, marks=FULL),
        pytest.param("counting", False, marks=FULL),
    ],
)
def test_killed_twice_in_a_row(make: Make, tmp_path: Path, dataset: str, with_producer: bool) -> None:
    """The second time right before the end of an epoch."""
    kind = {"samples": Samples, "counting": Counting, "plain": Plain}[dataset]
    options = {"shuffle": True, **OPTIONS} if dataset == "samples" else OPTIONS
    expected = take(make(kind(), cache=False, **options))
    trainers = Trainers(tmp_path, dataset, options=options, with_producer=with_producer, die=[14, 15], pace=0.02)
    assert trainers.run() == -signal.SIGKILL
    assert len(trainers.producers()) == int(not with_producer)
    before = trainers.producers()
    assert trainers.run() == -signal.SIGKILL
    assert int((tmp_path / "ready").read_text()) > 0, "its first batch lay there"
    assert trainers.producers() == before
    assert trainers.run() == 0
    assert trainers.digests() == expected
    trainers.nothing_left()


@pytest.mark.full
def test_a_source_without_a_state_is_fast_forwarded(make: Make, tmp_path: Path) -> None:
    expected = take(make(Plain(), cache=False))
    trainers = Trainers(tmp_path, "plain", with_producer=True, die=[7])
    assert trainers.run() == -signal.SIGKILL
    assert trainers.run() == 0
    assert trainers.digests() == expected


@pytest.mark.full
def test_nobody_comes_back(tmp_path: Path) -> None:
    """After its patience the producer removes everything, and ends with its workers."""
    trainers = Trainers(tmp_path, "samples", die=[3], options={**OPTIONS, "idle": 3.0, "num_workers": 2})
    assert trainers.run() == -signal.SIGKILL
    (pid,) = trainers.producers()
    group = os.getpgid(pid)
    trainers.nothing_left()
    wait_for(lambda: not _members(group), what="the end of all its processes")


def test_what_a_kill_of_everything_leaves_is_reclaimed(make: Make, tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, "samples", die=[3], with_producer=True)
    assert trainers.run() == -signal.SIGKILL
    assert list(top(str(tmp_path)).glob("*/*/r-*"))
    # The trainer was waited for; the producer, killed with it, holds its lock until the kernel is through with it.
    wait_for(lambda: all(map(_unlocked, top(str(tmp_path)).glob("*/*"))), what="the end of the killed producer")
    make(Samples(), run="another").close()
    assert not top(str(tmp_path)).exists()


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root sees the same user id inside")
def test_what_a_dead_container_leaves_is_reclaimed(make: Make, tmp_path: Path) -> None:
    """Its process numbers mean nothing outside; the kernel has ended its locks."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*inside, "true"], stderr=subprocess.DEVNULL, timeout=30).returncode:
        pytest.skip("no right to make a pid namespace")
    told = json.dumps({**Trainers(tmp_path, "samples", die=[3]).told})
    trainer = f"{sys.executable} {Path(__file__).with_name('trainer.py')} {tmp_path} '{told}'; true"
    assert subprocess.run([*inside, "sh", "-c", trainer], timeout=120).returncode == 0
    assert list(top(str(tmp_path)).glob("*/*/r-*"))
    wait_for(lambda: all(map(_unlocked, top(str(tmp_path)).glob("*/*"))), what="the end of the killed producer")
    make(Samples(), run="another").close()
    assert not top(str(tmp_path)).exists()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_all_ranks_are_killed_and_another_number_goes_on(make: Make, tmp_path: Path, before: int, after: int) -> None:
    """The ranks' batches are those of the uninterrupted orders, each sample of the epoch comes once, and nothing stale."""

    def ranks(world: int, **told: object) -> list[Trainers]:
        each = [{"shuffle": True, "idle": 5.0, "rank": rank, "world": world, **OPTIONS} for rank in range(world)]
        names = [f"-{world}-{rank}" for rank in range(world)]
        return [Trainers(tmp_path, "samples", who=w, batch=12 // world, options=o, **told) for w, o in zip(names, each, strict=True)]

    def whole(world: int) -> list[MmapLoader]:
        return [make(Samples(), 12 // world, cache=False, shuffle=True, rank=rank, world=world) for rank in range(world)]

    first = ranks(before, die=[2], pace=0.02)
    assert [process.wait(120) for process in [trainer.start() for trainer in first]] == [-signal.SIGKILL] * before
    states = [(tmp_path / f"state-{before}-{rank}").read_text() for rank in range(before)]
    assert len(set(states)) == 1
    assert [trainer.digests() for trainer in first] == [take(loader, 2) for loader in whole(before)]
    for rank in range(after):
        (tmp_path / f"state-{after}-{rank}").write_text(states[0])
    second = ranks(after)
    assert [process.wait(120) for process in [trainer.start() for trainer in second]] == [0] * after
    seen: list[int] = [index for loader in whole(before) for index in _indices(loader, 2)]
    for trainer, loader in zip(second, whole(after), strict=True):
        loader.load_state_dict(json.loads(states[0]))
        assert trainer.digests() == take(loader)
        loader.load_state_dict(json.loads(states[0]))
        seen += _indices(loader)
    assert sorted(seen) == list(range(60))
    first[0].nothing_left()


@pytest.mark.full
def test_an_uncaught_exception_keeps_the_batches_and_a_clean_end_removes_them(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from things import *\n"
    script += f"loader = MmapLoader(Samples(), 4, directory={str(tmp_path)!r}, run='x')\ntake(loader, 3)\n"
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


def _indices(loader: MmapLoader, count: int | None = None) -> list[int]:
    """The samples of the next batches of a pass."""
    return [int(index) for batch in itertools.islice(loader, count) if isinstance(batch, dict) for index in batch["index"]]


def _members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and running(int(path.name)):
            try:
                found += [int(path.name)] if os.getpgid(int(path.name)) == group else []
            except ProcessLookupError:
                continue
    return found
