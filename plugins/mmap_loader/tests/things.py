"""Data sets of the tests, in a module of their own so that the producer finds them, and what compares streams."""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from instep import codec
from instep.errors import UsageError
from instep_mmap_loader import MmapLoader

_PATIENCE = 60.0
OPTIONS = {"shuffle": True, "prefetch": 4, "lookback": 3}


class Samples:
    """Samples with random parts; ``fault`` says what happens at index 21, unless the file ``cured`` exists."""

    def __init__(self, size: int = 60, *, cost: float = 0.0, tag: int = 0, fault: str = "", cured: str = "") -> None:
        self.size, self.cost, self.tag, self.fault, self.cured = size, cost, tag, fault, cured

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, object]:
        time.sleep(self.cost)
        if index == 21 and self.fault and not (self.cured and Path(self.cured).exists()):
            self.fail()
        return {"index": index, "x": torch.rand(8) + index + self.tag, "word": f"{index}"}

    def fail(self) -> None:
        if self.fault == "raise":
            raise ValueError("sample 21 is broken")
        if self.fault == "block":
            time.sleep(1000)
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)


class Strange:
    """A value of a type that nothing knows."""

    def __init__(self, index: int) -> None:
        self.index = index


def strange(samples: list[dict[str, object]]) -> object:
    """A collate function with a value of an unknown type in some batches."""
    first = samples[0]["index"]
    odd: object = Strange(first) if isinstance(first, int) and first % 3 == 0 else first
    return {"x": [s["x"] for s in samples], "deep": [{"odd": odd}]}


class Counting(IterableDataset[torch.Tensor]):
    """An iterable that tells and takes its position."""

    def __init__(self, size: int = 40) -> None:
        self.size, self.at, self.epoch = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            yield torch.tensor([self.at, self.epoch])
        self.at = 0

    def state_dict(self) -> Mapping[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Plain(IterableDataset[torch.Tensor]):
    """An iterable without a state."""

    def __init__(self, size: int = 40, *, cost: float = 0.0) -> None:
        self.size, self.cost = size, cost

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.size):
            time.sleep(self.cost)
            yield torch.tensor([index]) + torch.rand(1)


class ByRank(IterableDataset[torch.Tensor]):
    """An iterable that takes its share as many scripts do, by the environment."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(int(os.environ["RANK"]), 40, 2):
            yield torch.tensor([index])


def digest(batch: object) -> str:
    """A few letters that stand for every bit of a batch."""
    try:
        return hashlib.sha256(codec.encode(batch)).hexdigest()[:12]
    except UsageError:
        return repr([part["odd"].index for part in batch["deep"]] if isinstance(batch, dict) else batch)


def take(loader: MmapLoader, count: int | None = None, *, epochs: int = 2) -> list[str]:
    """Digests of the next ``count`` batches, or of all of ``epochs`` epochs; goes on in the midst of a pass."""
    out: list[str] = []
    while loader.epoch < epochs:
        for batch in loader if not loader._open else _rest(loader):
            out.append(digest(batch))
            if len(out) == count:
                return out
    return out


def reference(make: Callable[..., MmapLoader], dataset: object | None = None, **options: object) -> list[str]:
    """The stream without a cache."""
    return take(make(dataset or Samples(), cache=False, **{**OPTIONS, **options}))


def _rest(loader: MmapLoader) -> Iterable[object]:
    while True:
        try:
            yield loader.following()
        except StopIteration:
            return


def producer(loader: MmapLoader) -> int:
    """Process id of a loader's producer, once it runs."""
    assert loader._cache is not None
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        pid = loader._cache._folder.noted("producer").get("pid")
        if isinstance(pid, int) and running(pid):
            return pid
        time.sleep(0.01)
    raise AssertionError("no producer")


def running(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(ready: Any, *, what: str, seconds: float = _PATIENCE) -> None:
    """Poll until ``ready()``; the deadline is for a machine under load."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def vanish(loader: MmapLoader) -> None:
    """Let go of the cache as a killed trainer does: without a word."""
    assert loader._cache is not None
    loader._cache._keeper.close()
    loader.abandon()


def filled(loader: MmapLoader, count: int) -> None:
    """Wait until the next ``count`` batches lie in the cache."""
    cache = loader._cache
    assert cache is not None
    wait_for(lambda: cache.valid(loader._next, count) >= count, what=f"{count} batches in the cache")
