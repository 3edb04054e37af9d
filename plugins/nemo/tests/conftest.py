"""Makes the helpers of this folder importable, and skips what needs NeMo where it is not installed."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "lightning" / "tests"))  # whose harness is used here
sys.path.insert(0, str(Path(__file__).parent))

from instep.testing.jobs import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """One warm fork server with NeMo in it."""
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("NeMo is not installed: make test-nemo builds an environment that has it")
    jobs = Jobs(tmp_path_factory.mktemp("nemo"))
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def runs(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Runs of the test job."""
    from nemo_harness import NemoRuns

    return NemoRuns(tmp_path_factory.mktemp("runs"), jobs)
