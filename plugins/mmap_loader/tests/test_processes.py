"""Ends, forks, stops and kills of the processes, at any moment: the stream stays what it is, and nothing is left."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from things import OPTIONS, Plain, Samples, filled, producer, reference, running, take, vanish, wait_for

from instep_mmap_loader import MmapLoader

Make = Callable[..., MmapLoader]
FULL = pytest.mark.full
pytestmark = pytest.mark.timeout(180)


def test_close_leaves_nothing_at_any_time(make: Make) -> None:
    """At once after the start, while it fetches and drops on its way through a source without a state, and in full swing."""
    for when in ("at once", "seeking", "working"):
        loader = make(Samples(10_000, cost=0.02) if when == "working" else Plain(10_000, cost=0.02), num_workers=2)
        cache = loader._cache
        assert cache is not None
        path = cache.path
        if when == "seeking":
            with pytest.warns(UserWarning, match="fetched and dropped"):
                loader.load_state_dict({**loader.state_dict(), "consumed": 8000})
            iter(loader)
            names = cache._folder.names
            wait_for(lambda names=names: any(name.startswith("free-") for name in names()), what="a producer at work")
        if when == "working":
            filled(loader, 2)
        process = producer(loader) if when != "at once" else 0
        loader.close()
        assert not path.exists()
        wait_for(lambda process=process: not process or not running(process), what="the end of the producer")


def test_a_forked_child_leaves_the_cache_alone(make: Make) -> None:
    """It gets the stream without the cache, takes nothing from its parent, and does not keep the parent's place when that one is gone."""
    expected = reference(make)
    loader = make(Samples(), **OPTIONS)
    got = take(loader, 3)
    before = producer(loader)
    gate, opened = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(take(loader, 2) != expected[3:5])
            loader.close()
            os.read(gate, 1)
        finally:
            os._exit(code)
    got += take(loader, 5)
    assert loader._cache is not None
    path = loader._cache.path
    vanish(loader)
    second = make(Samples(), **OPTIONS)
    assert second._cache is not None
    assert second._cache.path == path
    second.load_state_dict(loader.state_dict())
    assert second.ready() is not None
    assert producer(second) == before
    os.write(opened, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for end in (gate, opened):
        os.close(end)
    assert got + take(second) == expected


@FULL
def test_a_worker_that_is_killed_once_is_not_seen_in_the_stream(make: Make) -> None:
    """As by the kernel that is out of memory. The number that workers know themselves by stays."""
    expected = reference(make)
    loader = make(Samples(cost=0.02), num_workers=2, **OPTIONS)
    got = take(loader, 2)
    main = producer(loader)
    for _ in range(4):
        filled(loader, 4)  # so that none dies twice of one batch
        got += take(loader, 1)
        (first, *_) = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)
    assert producer(loader) == main
    assert got + take(loader) == expected


@FULL
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_odd_moments(make: Make, seed: int) -> None:
    """The producer goes, alone or with its workers, after a random while, again and again: while it starts, writes, or rests."""
    draw = random.Random(seed)
    expected = reference(make, num_workers=2)
    loader = make(Samples(), num_workers=2, **OPTIONS)
    got: list[str] = []
    while len(got) < len(expected):
        assert loader._cache is not None, "it must not give the cache up"
        pid = loader._cache._folder.noted("producer").get("pid")
        if isinstance(pid, int) and running(pid) and draw.random() < 0.5:
            time.sleep(draw.random() * 0.05)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL) if draw.random() < 0.5 else os.kill(pid, signal.SIGKILL)
        got += take(loader, draw.randrange(1, 4))
    assert got == expected


@FULL
def test_a_stopped_producer_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep_mmap_loader.keeper.SILENT", 3.0)
    expected = reference(make)
    loader = make(Samples(), **OPTIONS)
    got = take(loader, 3)
    stopped = producer(loader)
    os.kill(stopped, signal.SIGSTOP)
    assert got + take(loader) == expected
    wait_for(lambda: not running(stopped), what="its end")
