"""The example: neither instep nor faults change anything in what it prints."""

import re
from pathlib import Path

import pytest
from mcore_harness import SETTINGS

from instep.testing.faults import Faults
from instep.testing.jobs import JobRun, Jobs, Script

RUNNER = Path(__file__).with_name("mcore_example.py")
EXAMPLES = next(folder / "examples" for folder in RUNNER.parents if (folder / "examples" / "train_megatron.py").exists())
WITH, WITHOUT = EXAMPLES / "train_megatron.py", EXAMPLES / "train_megatron_plain.py"


def printed(run: JobRun) -> list[str]:
    """The losses, each once: a step that was done again may tell its loss again."""
    return list(dict.fromkeys(re.findall(r"step +\d+ +loss .*", run.log(0))))


@pytest.mark.timeout(120)
def test_same_losses(jobs: Jobs) -> None:
    """Without instep, with it, and with two faults."""
    protected = Script(str(RUNNER), (str(WITH),), ranks=4, steps=None)
    clean = jobs.clean(protected, SETTINGS)
    faulty = jobs.drill(protected, Faults().kill(rank=3).at(step=6, phase="backward").kill(rank=0).at(step=13, phase="amid"), SETTINGS)
    plain = jobs.run(Script(str(RUNNER), (str(WITHOUT),), ranks=4, steps=None), settings=SETTINGS)

    assert plain.outcome.code == 0, plain.log(0)[-2000:]
    assert len(printed(clean)) == 4
    assert printed(faulty)[-1] == printed(clean)[-1] == printed(plain)[-1]
