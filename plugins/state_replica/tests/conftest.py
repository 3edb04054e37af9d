"""Makes the helpers of this folder importable, in this process and in those that the tests start."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replica_world import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Makes worlds of real processes and ends them after the test."""
    worlds: list[World] = []

    def make(size: int, *, groups: Mapping[str, tuple[int, ...]] | None = None, **settings: int) -> World:
        worlds.append(World(size, groups=groups, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
