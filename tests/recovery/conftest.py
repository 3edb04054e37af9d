"""One warm fork server and one set of clean runs for all recovery tests."""

from collections.abc import Iterator

import pytest

from instep.agent.agent import Launch, serving
from instep.agent.spawner import Server
from tests.recovery.harness import JOB, Jobs


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A fork server that outlives the single job."""
    with serving(Launch(script=str(JOB), nproc=4)) as server:
        yield server


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Jobs:
    """Runs the test job; equal shapes share one clean run."""
    return Jobs(tmp_path_factory.mktemp("jobs"), server)
