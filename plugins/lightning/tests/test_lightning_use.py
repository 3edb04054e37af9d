"""Wrong and unusual uses: each works, or says what is wrong and what to do."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from light_harness import SETTINGS

from instep.testing.jobs import JobRun, Jobs, Script

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine
USE = str(Path(__file__).with_name("light_use.py"))


def use(jobs: Jobs, case: str) -> JobRun:
    """Run a case on two ranks under an agent."""
    return jobs.run(Script(USE, (case,), ranks=2, steps=None), settings={**SETTINGS, "limits.same_fault": 2})


@pytest.fixture(scope="module")
def alone() -> str:
    """What the cases that need no job print, in one process."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: pip install 'instep-lightning[lightning]'")
    words = [sys.executable, USE, "refusals", "detached", "alone"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("spawn", "use strategy='ddp'"),
        ("precision", "Other is not supported: use 32"),
        ("swa", "StochasticWeightAveraging is not supported: it changes parameters outside"),
        ("reload", "reload_dataloaders_every_n_epochs"),
        ("hook", "communication hook"),
    ],
)
def test_refused(alone: str, what: str, says: str) -> None:
    (line,) = [line for line in alone.splitlines() if line.startswith(f"REFUSED {what}: ")]

    assert says in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDPStrategy itself refuses a machine without a GPU")
def test_fully_sharded_data_parallel_is_refused() -> None:
    done = subprocess.run([sys.executable, USE, "fsdp"], capture_output=True, text=True, timeout=150, check=True)

    assert "REFUSED fsdp: FSDPStrategy flattens parameters" in done.stdout


def test_weight_averaging_is_refused_where_there_is_one(alone: str) -> None:
    assert ("THERE average" in alone) == ("REFUSED average: the callback WeightAveraging is not supported" in alone)


def test_without_instep_run(alone: str) -> None:
    """One warning, and the training that it would be without the callback."""
    assert alone.count("InstepCallback without `instep run`") == 1
    assert "TRAINED 24" in alone


def test_one_place_is_changed_and_given_back(alone: str) -> None:
    assert "DETACHED True True" in alone


def test_callback_that_raises(jobs: Jobs) -> None:
    """The same step is tried again, and then the job says what it was; Lightning's teardown hears of it once, at the very end at most."""
    run = use(jobs, "raising")

    assert run.outcome.code == 70
    assert "this callback has a mistake" in run.outcome.message
    assert {i.step for i in run.incidents} == {2}
    assert run.log(0).count("teardown after") <= 1


def test_second_fit(jobs: Jobs) -> None:
    run = use(jobs, "twice")

    assert run.outcome.code != 0
    assert "a second trainer.fit in one script" in run.outcome.message


def test_fit_between_validate_test_and_predict(jobs: Jobs) -> None:
    run = use(jobs, "then_test")

    assert run.outcome.code == 0, run.log(0)[-3000:]
    assert "TESTED 12 True 3" in run.log(0)


def test_data_without_a_position(jobs: Jobs) -> None:
    run = use(jobs, "batches")

    assert run.outcome.code != 0
    assert "training data in a Batches has no position to return to" in run.outcome.message
