"""Agent and fork server stopped for a while in each phase of a recovery: it takes longer, and that is all."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.agent.agent import Launch, serving
from tests.recovery.harness import JOB, Fault, Jobs, Shape

FREEZER = Path(__file__).with_name("freezer")
PHASES = ("start", "quiesce", "reinit_comms", "restore_state", "resume_data", "verify")
SHAPE = Shape(ranks=3, steps=8)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs whose processes can see the plugin."""
    path = os.pathsep.join([str(FREEZER), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FREEZER))
        patch.setenv("PYTHONPATH", path)
        with serving(Launch(script=str(JOB), nproc=3)) as server:
            yield Jobs(tmp_path_factory.mktemp("stopped"), server)


@pytest.mark.parametrize(("target", "phase"), list(itertools.product(("agent", "forkserver"), PHASES)))
def test_nothing_but_time_is_lost(jobs: Jobs, tmp_path: Path, target: str, phase: str) -> None:
    flag = tmp_path / "flag"
    settings: dict[str, Any] = {"plugins.freezer": {"phase": phase, "target": target, "flag": str(flag)}}
    run = jobs.check(SHAPE, [Fault("kill", 1, "mid_backward", step=4)], **settings)

    assert flag.read_text() == phase
    (incident,) = run.incidents
    assert {rank for attempt in incident.attempts for rank in attempt.fault.ranks} == {1}
