"""The example of HSDP: what it costs in lines against the same script without instep, and that faults change nothing in what it prints."""

import difflib
import re
from pathlib import Path

import pytest

from instep.testing.faults import Faults
from instep.testing.jobs import JobRun, Jobs, Script

ROOT = Path(__file__).parents[3]
WITH, WITHOUT = ROOT / "examples" / "train_fsdp.py", ROOT / "examples" / "train_fsdp_plain.py"
MOST = 15


def printed(run: JobRun) -> list[str]:
    """The losses, each once: a step that was done again may tell its loss again."""
    return list(dict.fromkeys(re.findall(r"step +\d+ +loss .*", run.log(0))))


def test_lines() -> None:
    plain, protected = (file.read_text().splitlines() for file in (WITHOUT, WITH))
    added = [line for line in difflib.ndiff(plain, protected) if line.startswith("+ ")]

    assert 0 < len(added) <= MOST


def test_page() -> None:
    """What the documentation shows stands in the example."""
    shown = (ROOT / "docs" / "how-to" / "sharded.md").read_text().partition("```text\n")[2].partition("```")[0].splitlines()
    lines = WITH.read_text().splitlines()

    assert [line for line in shown if line.strip() not in ("", "...") and line not in lines] == []
    assert shown


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
