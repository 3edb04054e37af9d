"""One set of clean runs for all recovery tests."""

from pathlib import Path

import pytest

from tests.recovery.harness import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Runs the test job; equal shapes share one clean run."""
    directory: Path = tmp_path_factory.mktemp("jobs")
    return Jobs(directory)
