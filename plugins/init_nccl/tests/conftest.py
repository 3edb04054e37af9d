"""Makes the helpers of this folder importable, and finds the real NCCL libraries."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from libraries import Nccl, found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that asks for a real library runs with each that there is; without any it is skipped, with the reason."""
    if "nccl" in metafunc.fixturenames:
        paths = found()
        metafunc.parametrize("nccl", paths or [None], ids=[p.parent.name for p in paths] or ["none"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU runs only if it is asked for."""
    if "gpu" not in str(config.getoption("-m")):
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture
def nccl(request: pytest.FixtureRequest) -> Iterator[Nccl]:
    """A real NCCL library in a process of its own, which ends with the test."""
    if request.param is None:
        pytest.skip("no NCCL library: `make test` fetches one into build/nccl, `make test-nccl` every one")
    with Nccl(request.param) as library:
        yield library
