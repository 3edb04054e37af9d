"""Makes the helpers of this folder importable, in this process and in those that the tests start; one fork server for their jobs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.agent.agent import Launch, serving
from instep.agent.spawner import Server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def sessions() -> Iterator[Server]:
    """A warm fork server for the scripts of ``session_world.play``."""
    with serving(Launch(script="none.py", nproc=3)) as server:
        yield server
