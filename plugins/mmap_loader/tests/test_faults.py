"""The fault matrix in one process: whatever happens to the cache, the delivered stream is that of a run without it."""

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from things import OPTIONS, Counting, Samples, digest, filled, producer, reference, running, strange, take, vanish, wait_for

from instep_mmap_loader import MmapLoader
from instep_mmap_loader.errors import LoaderError

Make = Callable[..., MmapLoader]
FULL = pytest.mark.full
pytestmark = pytest.mark.timeout(180)


def records(loader: MmapLoader) -> list[Path]:
    assert loader._cache is not None
    return sorted(loader._cache.path.glob("r-*"))


def each(loader: MmapLoader, change: Callable[[Path], object]) -> None:
    """Change every record that is not recycled in that very moment."""
    for path in records(loader):
        with contextlib.suppress(FileNotFoundError):
            change(path)


def truncate(loader: MmapLoader) -> None:
    each(loader, lambda path: os.truncate(path, path.stat().st_size // 3))


def empty(loader: MmapLoader) -> None:
    each(loader, lambda path: os.truncate(path, 0))


def flip(loader: MmapLoader) -> None:
    """A bit in the last byte in use, which belongs to the data, or in the header."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[data.find(b'"tree"') + 2 if path.name.endswith("2") else len(data.rstrip(b"\0")) - 1] ^= 1
        with path.open("r+b") as file:
            file.write(data)

    each(loader, change)


def remove(loader: MmapLoader) -> None:
    each(loader, Path.unlink)


def wipe(loader: MmapLoader) -> None:
    assert loader._cache is not None
    path = loader._cache.path

    def gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)  # files are made meanwhile
        return not path.exists()

    wait_for(gone, what="the directory's end")


def kill(loader: MmapLoader) -> None:
    os.kill(producer(loader), signal.SIGKILL)


def kill_and_flip(loader: MmapLoader) -> None:
    kill(loader)
    flip(loader)


def again(loader: MmapLoader) -> object:
    """The next batch; it may have failed once more before its cause was gone."""
    try:
        return loader.following()
    except LoaderError:
        return loader.following()


DAMAGES = [
    flip,
    kill,
    pytest.param(truncate, marks=FULL),
    pytest.param(wipe, marks=FULL),
    pytest.param(empty, marks=FULL),
    pytest.param(remove, marks=FULL),
    pytest.param(kill_and_flip, marks=FULL),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_not_seen_in_the_stream(make: Make, damage: Callable[[MmapLoader], None]) -> None:
    expected = reference(make)
    loader = make(Samples(), **OPTIONS)
    got = take(loader, 5)
    filled(loader, 3)
    damage(loader)
    got += take(loader, 1)
    if damage is not kill:
        wait_for(lambda: records(loader), what="records")
        damage(loader)
    assert got + take(loader) == expected


@pytest.mark.parametrize("damage", [remove, pytest.param(kill, marks=FULL), pytest.param(wipe, marks=FULL)], ids=lambda f: f.__name__)
def test_damage_below_a_stateful_source(make: Make, damage: Callable[[MmapLoader], None]) -> None:
    expected = reference(make, Counting(), shuffle=False)
    loader = make(Counting(), prefetch=4, lookback=3)
    got = take(loader, 3)
    filled(loader, 2)
    damage(loader)
    assert got + take(loader) == expected


def test_roll_back(make: Make) -> None:
    """By one batch and by three out of the cache, by nine and across an epoch by making them again."""
    expected = reference(make)
    loader = make(Samples(), num_workers=2, **OPTIONS)
    states, got = [loader.state_dict()], []
    for _ in range(20):
        got += take(loader, 1)
        states.append(loader.state_dict())
    assert got == expected[:20]
    for back, cached in ((1, True), (3, True), (9, False), (14, False)):
        at = len(got) - back
        loader.load_state_dict(states[at])
        if cached:
            assert loader.ready() is not None
        assert take(loader, back) == expected[at : len(got)]
    assert take(loader) == expected[20:]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"seed": 6}, marks=FULL),
        {"batch_size": 6},
        pytest.param({"tag": 1}, marks=FULL),
        pytest.param({"world": 2}, marks=FULL),
    ],
    ids=str,
)
def test_another_stream_gets_nothing_stale(make: Make, tmp_path: Path, change: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Same run, same name, another data set, seed, batch size or data-parallel size; the first loader's process was killed, so to speak."""
    first = make(Samples(), rank=0, world=1, **OPTIONS)
    take(first, 2)
    filled(first, 3)
    assert first._cache is not None
    before, path = producer(first), first._cache.path
    vanish(first)
    data = Samples(tag=change.get("tag", 0))
    options = {"rank": 0, "world": 1, **OPTIONS, **{k: v for k, v in change.items() if k != "tag"}}
    with caplog.at_level(logging.INFO):
        second = make(data, **options)
    assert second._cache is not None
    assert second._cache.path == path
    assert "another data set" in caplog.text
    assert take(second) == take(make(data, cache=False, **options))
    assert not running(before)
    assert second._cache._folder.noted("producer")["generation"] == 1


def test_an_exception_comes_with_its_traceback_at_its_batch(make: Make, tmp_path: Path) -> None:
    """All batches before it are delivered; when its cause is gone the stream goes on."""
    cured = tmp_path / "cured"
    expected = reference(make, shuffle=False)
    loader = make(Samples(fault="raise", cured=str(cured)), prefetch=4)
    assert take(loader, 5) == expected[:5]
    for _ in range(2):
        with pytest.raises(LoaderError, match="sample 21 is broken") as caught:
            loader.following()
        assert "things.py" in str(caught.value)
        assert "in __getitem__" in str(caught.value)
    cured.touch()
    assert [digest(again(loader)), *take(loader)] == expected[5:]


def test_an_error_is_not_told_to_the_next_trainer(make: Make, tmp_path: Path) -> None:
    """The first one was killed while its producer, which lives on, had come upon a broken sample; meanwhile that was mended."""
    cured = tmp_path / "cured"
    expected = reference(make, shuffle=False)
    loader = make(Samples(fault="raise", cured=str(cured)), prefetch=6)
    take(loader, 2)
    wait_for(lambda: any(path.name == "r-0-20" for path in records(loader)), what="the broken batch")
    state = loader.state_dict()
    vanish(loader)
    cured.touch()
    second = make(Samples(fault="raise", cured=str(cured)), prefetch=6)
    second.load_state_dict(state)
    assert take(second) == expected[2:]


@FULL
def test_a_dying_worker_is_named(make: Make, tmp_path: Path) -> None:
    cured = tmp_path / "cured"
    expected = reference(make, shuffle=False)
    loader = make(Samples(fault="die", cured=str(cured)), num_workers=2)
    assert take(loader, 5) == expected[:5]
    with pytest.raises(LoaderError, match=r"was killed by SIGKILL, as was another, while it made the batch of \[20, 21"):
        loader.following()
    cured.touch()
    assert [digest(again(loader)), *take(loader)] == expected[5:]


def test_a_blocking_data_set_is_named_after_the_deadline(make: Make) -> None:
    loader = make(Samples(fault="block"), timeout=1.0, name="words")
    filled(loader, 5)
    take(loader, 5)
    with pytest.raises(LoaderError, match=r"'words-0': the batch at epoch 0, sample 20 was not made within 1 s"):
        loader.following()
    process = producer(loader)
    loader.close()
    wait_for(lambda: not running(process), what="the end of the producer")


def test_an_unknown_type_bypasses_the_cache(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    expected = reference(make, collate_fn=strange, shuffle=False)
    assert take(make(Samples(), collate_fn=strange)) == expected
    assert "batch['deep'][0]['odd']: a value of type things.Strange" in caplog.text


def test_what_cannot_be_pickled_works_without_the_cache(make: Make) -> None:
    with pytest.warns(UserWarning, match="cannot be sent to the producer"):
        loader = make(Samples(), collate_fn=lambda samples: samples, shuffle=True)
    assert take(loader) == take(make(Samples(), collate_fn=list, shuffle=True, cache=False))
