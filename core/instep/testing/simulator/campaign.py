"""Many seeds, over several processes: how they ended, and which of them broke a rule."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Self

from instep.testing.simulator.schedule import Kind, drawn
from instep.testing.simulator.world import World, quiet

_CHUNK = 250


@dataclass
class Tally:
    """What a number of seeds came to. ``failures``: seed and message; ``kinds``: troubles that happened."""

    seeds: int = 0
    whole: int = 0
    given_up: int = 0
    incidents: int = 0
    incarnations: int = 0
    events: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Self) -> None:
        """Count another tally in."""
        self.seeds += other.seeds
        self.whole += other.whole
        self.given_up += other.given_up
        self.incidents += other.incidents
        self.incarnations += other.incarnations
        self.events += other.events
        self.kinds += other.kinds
        self.failures += other.failures


def chunk(first: int, count: int) -> Tally:
    """Run ``count`` seeds from ``first``."""
    tally = Tally(seeds=count)
    with quiet():
        for seed in range(first, first + count):
            world = World(drawn(seed))
            try:
                outcome = world.run()
            except Exception as error:  # noqa: BLE001 - a violation, or core broke in a way that nobody thought of
                tally.failures.append((seed, f"{type(error).__name__}: {error}"))
                continue
            tally.whole += outcome.end.code == 0
            tally.given_up += outcome.end.code != 0
            tally.incidents += outcome.incidents
            tally.incarnations += outcome.incarnations
            tally.events += outcome.events
            tally.kinds.update(trouble.kind for trouble, _ in outcome.happened)
    return tally


def campaign(first: int, count: int, *, jobs: int | None = None, progress: Callable[[Tally], None] | None = None) -> Tally:
    """Run ``count`` seeds from ``first`` in ``jobs`` processes, by default one for each core; ``progress`` sees the tally grow."""
    total = Tally()
    for part in _parts(first, count, jobs or len(os.sched_getaffinity(0))):
        total.add(part)
        if progress is not None:
            progress(total)
    return total


def _parts(first: int, count: int, jobs: int) -> Iterator[Tally]:
    starts = range(first, first + count, _CHUNK)
    sizes = [min(_CHUNK, first + count - start) for start in starts]
    if jobs == 1:
        yield from map(chunk, starts, sizes)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(chunk, starts, sizes)
