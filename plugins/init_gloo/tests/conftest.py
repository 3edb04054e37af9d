"""Makes the helpers of this folder importable, in this process and in those that the tests start."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gloo_world import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Makes worlds of real processes and ends them after the test."""
    worlds: list[World] = []

    def make(size: int, **settings: float) -> World:
        worlds.append(World(size, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
