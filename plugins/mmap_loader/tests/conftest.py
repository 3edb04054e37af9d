"""Makes the helpers of this folder importable, in this process and in those that the tests start, and gives each test its own cache."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from instep_mmap_loader import MmapLoader

Make = Callable[..., MmapLoader]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the whole fault matrix or of a soak; runs with `-m full` only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in str(config.getoption("-m")):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes loaders whose cache lies in the test's directory, and closes them."""
    loaders: list[MmapLoader] = []

    def make(dataset: object, batch_size: int | None = 4, **options: Any) -> MmapLoader:
        options = {"directory": str(tmp_path), "run": "test", "seed": 5, **options}
        loaders.append(MmapLoader(dataset, batch_size, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
