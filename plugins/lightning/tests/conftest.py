"""Makes the helpers of this folder importable, and skips it all where Lightning is not installed."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from instep.testing.jobs import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """One warm fork server with Lightning in it."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: pip install 'instep-lightning[lightning]'")
    jobs = Jobs(tmp_path_factory.mktemp("lightning"))
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def runs(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Runs of the test job."""
    from light_harness import Runs

    return Runs(tmp_path_factory.mktemp("runs"), jobs)


@pytest.fixture(scope="session")
def varied(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Runs of the job with several loaders and loggers."""
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("TensorBoard is not installed: pip install tensorboard")
    from light_harness import VARIED, Runs

    return Runs(tmp_path_factory.mktemp("varied"), jobs, VARIED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU runs with ``-m gpu`` only, what takes long with ``-m full``."""
    for marker in ("gpu", "full"):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out and marker not in str(config.getoption("-m")):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
