"""The laws that this plugin keeps, and what becomes of a NaN in a real job."""

import math
from pathlib import Path

import pytest

from instep import Plugin, drill
from instep.testing import DetectorContract, Jobs, Script
from my_plugin import MyPlugin

TRAIN = str(Path(__file__).parents[1] / "train.py")
ENABLED = {"plugins.my_plugin": True}


class TestMyPlugin(DetectorContract):
    plugin = MyPlugin
    settings = {"retries": 3}  # the contract provokes a fault twice, in this very process

    def provoke(self, plugin: Plugin) -> None:
        assert isinstance(plugin, MyPlugin)
        plugin.watch(math.nan)


@pytest.mark.parametrize(("times", "kinds"), [(1, ["exception"]), (2, ["exception", "exit"])], ids=["repeated", "replaced"])
def test_a_nan_never_reaches_the_weights(job: Jobs, times: int, kinds: list[str]) -> None:
    clean = job.clean(Script(TRAIN, steps=None), ENABLED)
    run = job.run(Script(TRAIN, ("--bad", "1@5", "--times", str(times)), steps=None), settings=ENABLED)
    assert run.outcome.code == 0, run.outcome.message
    faults = [attempt.fault for incident in run.incidents for attempt in incident.attempts]
    assert [(fault.kind, fault.ranks) for fault in faults] == [(kind, (1,)) for kind in kinds]
    assert "plugin my_plugin detected: the loss of rank 1 is nan" in faults[0].detail
    assert [incident.steps_lost for incident in run.incidents] == [0] * len(run.incidents)
    assert drill.compare(clean.trace, run.trace, resumed=drill.resumed(run.incidents)) is None


def test_without_the_plugin_it_does(job: Jobs) -> None:
    clean = job.clean(Script(TRAIN, steps=None), ENABLED)
    run = job.run(Script(TRAIN, ("--bad", "1@5"), steps=None))
    assert (run.outcome.code, run.incidents) == (0, [])
    assert drill.compare(clean.trace, run.trace) is not None


def test_a_nan_that_always_comes_back_stops_the_job(job: Jobs) -> None:
    """Without limit the job would repeat the step for ever: the circuit breaker knows the fault again."""
    script = Script(TRAIN, ("--bad", "1@5", "--times", "1000"), steps=None)
    run = job.run(script, settings={"plugins.my_plugin": {"retries": 1000}})
    assert run.outcome.code == 70
    assert "the loss of rank 1 is nan" in run.outcome.message
