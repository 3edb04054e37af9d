"""The example of HSDP: neither instep nor faults change anything in what it prints."""

import re
from pathlib import Path

import pytest

from instep.testing.faults import Faults
from instep.testing.jobs import JobRun, Jobs, Script

ROOT = Path(__file__).parents[3]
WITH, WITHOUT = ROOT / "examples" / "train_fsdp.py", ROOT / "examples" / "train_fsdp_plain.py"


def printed(run: JobRun) -> list[str]:
    """The losses, each once: a step that was done again may tell its loss again."""
    return list(dict.fromkeys(re.findall(r"step +\d+ +loss .*", run.log(0))))


@pytest.mark.timeout(120)
def test_same_losses(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without instep, with it, and with faults."""
    monkeypatch.setenv("STEPS", "30")
    protected = Script(str(WITH), ranks=4, steps=None)
    clean = job.clean(protected)
    faulty = job.drill(protected, Faults().kill(rank=3).at(step=6, phase="backward").kill(rank=0).at(step=13, phase="amid"))
    plain = job.run(Script(str(WITHOUT), ranks=4, steps=None))

    assert plain.outcome.code == 0, plain.log(0)[-2000:]
    assert len(printed(clean)) == 3
    assert printed(faulty) == printed(clean) == printed(plain)
