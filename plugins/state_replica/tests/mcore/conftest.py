"""Makes the helpers of this folder importable, and skips it all where megatron-core is not installed."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from instep.testing.jobs import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """One warm fork server with Megatron in it, and one clean run for each layout and length."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed: pip install 'instep-state-replica[megatron]'")
    jobs = Jobs(tmp_path_factory.mktemp("megatron"))
    yield jobs
    jobs.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """As in the tests across packages: what is marked ``full`` runs with ``-m full`` only."""
    if "full" not in str(config.getoption("-m")):
        items[:] = [item for item in items if not item.get_closest_marker("full")]
