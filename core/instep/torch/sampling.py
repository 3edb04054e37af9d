"""The order of a map-style loader, reproducible from a few numbers: it can be entered again anywhere, without fetching anything."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

_MASK = 2**64 - 1
_DRAWS_AT_FIRST_STEP = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""torch's samplers take all that they need from the global generators before they yield their first index."""

T = TypeVar("T")


@dataclass
class Position:
    """Where to enter the order, and the seeds that it and the batches follow from."""

    order_seed: int = 0
    base_seed: int = 0
    delivered: int = 0


def mix(seed: int, number: int) -> int:
    """One of many unrelated seeds that follow from one (SplitMix64, Steele et al. 2014)."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def seed_all(seed: int) -> None:
    """Seed the generators that a sampler or a transform may use: python, numpy, torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what scripts use
    torch.default_generator.manual_seed(seed)


class Sandbox:
    """Generators of its own for whatever runs inside; those outside do not move."""

    def __init__(self, seed: int) -> None:
        outside = _take()
        seed_all(seed)
        self._inside = _take()
        _put(outside)

    def __enter__(self) -> None:
        self._outside = _take()
        _put(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _take()
        _put(self._outside)


@contextmanager
def unmoved() -> Iterator[None]:
    """Generators stand afterwards where they stood before."""
    state = _take()
    try:
        yield
    finally:
        _put(state)


class Seeded(Generic[T]):
    """An index on its way to a loader worker; the worker's generators are seeded for this batch when it arrives there."""

    def __init__(self, index: T, seed: int) -> None:
        self._index, self._seed = index, seed

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (self._index, self._seed)


class Order:
    """Stands in for a loader's sampler: same indices, from the position of the pass on, each step in the pass's sandbox."""

    def __init__(self, sampler: Iterable[object], position: Position, *, workers: bool) -> None:
        self._sampler, self._position, self._workers = sampler, position, workers

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[object]:
        number, seed = self._position.delivered, self._position.base_seed
        for index in self._from(number):
            yield Seeded(index, mix(seed, number)) if self._workers else index
            number += 1

    def _from(self, skip: int) -> Iterator[object]:
        sandbox, end = Sandbox(self._position.order_seed), object()
        with sandbox:
            steps = iter(self._sampler)
            for _ in range(skip):
                next(steps, end)
            index = next(steps, end)
        while index is not end:
            yield index
            if _needs_sandbox(self._sampler):
                with sandbox:
                    index = next(steps, end)
            else:
                index = next(steps, end)


def _needs_sandbox(sampler: object) -> bool:
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) not in _DRAWS_AT_FIRST_STEP


def _arrive(index: T, seed: int) -> T:
    seed_all(seed)
    return index


def _take() -> tuple[object, object, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002


def _put(state: tuple[object, object, torch.Tensor]) -> None:
    random.setstate(cast(tuple[object, ...], state[0]))
    np.random.set_state(cast(dict[str, object], state[1]))  # noqa: NPY002
    torch.default_generator.set_state(state[2])
