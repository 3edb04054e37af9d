"""What the cache costs while nothing fails: put and get next to a copy, throughput next to ``DataLoader``."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from loader_data import KEYS, SAMPLES, TOKENS, Tokens
from torch.utils.data import DataLoader

from instep_mmap_loader import MmapLoader
from instep_mmap_loader.files import Mapped, Pool, record_name
from instep_mmap_loader.folder import Folder, top
from instep_mmap_loader.order import At
from instep_mmap_loader.record import Label, draft, read, write

ROTATION = 24
AHEAD = 8
_PATIENCE = 60


def copies(rounds: int) -> dict[str, float]:
    """Put and get, each next to a copy of as many bytes between memory that no cache holds: medians in milliseconds, and ratios."""
    times: dict[str, list[float]] = {"copy": [], "put": [], "get": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
        folder = Folder.make(top(directory) / "run" / "bench.0")
        for turn, (copied, put, got) in enumerate(_turns(folder, rounds * ROTATION)):
            if turn >= 2 * ROTATION:  # by then every page is there and mapped
                times["copy"].append(copied)
                times["put"].append(put)
                times["get"].append(got)
        folder.close()
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}_ms": value for name, value in medians.items()},
        "put_over_copy": medians["put"] / medians["copy"],
        "get_over_copy": medians["get"] / medians["copy"],
    }


def _turns(folder: Folder, count: int) -> Iterator[tuple[float, float, float]]:
    """Seconds of one copy, one put, and one get of what was put almost a rotation ago."""
    batches = [{k: torch.ones(SAMPLES, TOKENS, dtype=t) * i for k, t in KEYS.items()} for i in range(ROTATION)]
    size = sum(t.nbytes for t in batches[0].values())
    buffers = [np.ones(size, np.uint8) for _ in range(2 * ROTATION)]
    pool, mapped, reading = Pool(folder, slots=ROTATION, capacity=None), Mapped(folder, writable=True), Mapped(folder, writable=False)
    for turn in range(count):
        number, at = turn % ROTATION, At(0, turn)
        begin = time.perf_counter()
        np.copyto(buffers[number], buffers[ROTATION + number])
        copied = time.perf_counter()
        slot = pool.take(set())
        assert slot is not None
        record = draft(Label("batch", at, At(0, turn + 1), "f", 0), batches[number])
        view = mapped.view(slot, needs=record.needs, limit=1 << 30)
        write(record, view)
        os.rename(slot, record_name(at), src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        pool.done(at, At(0, turn + 1), slot=slot, size=len(view))
        put = time.perf_counter()
        old = At(0, max(0, turn - ROTATION + 2))
        content = read(reading.view(record_name(old)), fingerprint="f")
        got = time.perf_counter()
        assert content.label.at == old
        yield copied - begin, put - copied, got - put


def throughput(cost: float, *, workers: int, batches: int, rounds: int) -> float:
    """Batches a second through the cache, over those through ``DataLoader``: the median of rounds in which each runs twice, in turn."""
    data = Tokens(100_000, cost)
    ours = MmapLoader(data, SAMPLES, num_workers=workers, name="throughput")

    def plain() -> float:
        return _seconds(iter(DataLoader(data, SAMPLES, num_workers=workers)), batches)  # type: ignore[arg-type]

    def cached() -> float:
        seconds = _seconds(iter(ours), batches)
        filled(ours)  # so that the producer rests while the other one is measured
        return seconds

    ratios = []
    for _ in range(rounds):
        first, second, third, fourth = plain(), cached(), cached(), plain()
        ratios.append((first + fourth) / (second + third))
    ours.close()
    return statistics.median(ratios)


def _seconds(steps: Iterator[object], batches: int) -> float:
    """Seconds of so many batches, after those that lay ready."""
    for _ in range(AHEAD + 2):
        next(steps)
    begin = time.perf_counter()
    for _ in range(batches):
        next(steps)
    return time.perf_counter() - begin


def filled(loader: MmapLoader) -> None:
    """Wait until the cache holds as many batches as it may be ahead."""
    end = time.monotonic() + _PATIENCE
    while loader._cache is None or loader._cache.valid(loader._next, AHEAD) < AHEAD:
        assert time.monotonic() < end, f"the cache was not filled within {_PATIENCE} s"
        time.sleep(0.02)
