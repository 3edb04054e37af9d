"""Wrong and unusual uses: each works, or says what is wrong and what to do."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_harness import NemoRuns

from instep.testing.faults import Faults

pytestmark = pytest.mark.timeout(300)  # real jobs on a busy machine, and an import of NeMo
USE = str(Path(__file__).with_name("nemo_use.py"))


@pytest.fixture(scope="module")
def alone() -> str:
    """What the cases that need no job print, in one process."""
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("NeMo is not installed: make test-nemo builds an environment that has it")
    words = [sys.executable, USE, "refusals", "described", "alone"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("nothing", "nothing"),
        ("fsdp", "num_distributed_optimizer_instances=2"),
        ("pytorch", "use ddp='megatron'"),
        ("ddp", "from instep_lightning import InstepCallback"),
        ("lightning", "from instep_nemo import InstepCallback"),
    ],
)
def test_refused(alone: str, what: str, part: str) -> None:
    (line,) = [line for line in alone.splitlines() if line.startswith(f"REFUSED {what}:")]

    assert part in line


def test_a_recipe_describes_the_callback(alone: str) -> None:
    """And the trainer of NeMo, which copies its arguments, keeps a description of it."""
    assert "DESCRIBED True True" in alone
    assert "WARNED 1" in alone


def test_without_instep_run(alone: str) -> None:
    assert "TRAINED 2 True" in alone


def test_one_instance(runs: NemoRuns) -> None:
    """Nobody else has a shard: refused before training begins, unless copies are kept."""
    ended = runs.run("--instances", "1", settings={"limits.same_fault": 1})

    assert ended.run.outcome.code != 0
    assert "Set num_distributed_optimizer_instances=2" in ended.run.outcome.message
    assert "plugins.state_replica.buddies = true" in ended.run.outcome.message


def test_one_instance_with_buddies(runs: NemoRuns) -> None:
    """Copies on another rank bring a lost shard back; a step may be done again."""
    faults = (
        Faults().kill(rank=1).at(step=3, phase="backward").kill(rank=2).at(step=7, phase="body").kill(rank=0).at(step=9, mark="batch_end")
    )
    runs.check(faults, "--instances", "1", settings={"plugins.state_replica": {"buddies": True}}, steps_lost=1)
