"""The example: what it costs in lines against the same script without instep, and that faults change nothing in what it logs."""

import csv
import difflib
import importlib.util
from pathlib import Path

import pytest
from light_harness import SETTINGS

from instep.testing.faults import Faults
from instep.testing.jobs import JobRun, Jobs, Script

EXAMPLES = next(folder / "examples" for folder in Path(__file__).parents if (folder / "examples" / "train_lightning.py").exists())
WITH, WITHOUT = EXAMPLES / "train_lightning.py", EXAMPLES / "train_lightning_plain.py"


def test_lines() -> None:
    """An import, the callback, and what the script says about itself."""
    plain, protected = ([line for line in file.read_text().splitlines() if line.strip()] for file in (WITHOUT, WITH))
    added = [line[2:] for line in difflib.ndiff(plain, protected) if line.startswith("+ ")]

    assert len(added) == 3
    assert "from instep_lightning import InstepCallback" in added


@pytest.mark.timeout(180)
def test_digits(jobs: Jobs, tmp_path: Path) -> None:
    """Four ranks learn to read digits; two of them die, one hangs."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed: pip install scikit-learn")
    faults = (
        Faults().kill(rank=0).at(step=4, phase="backward").kill(rank=3).at(step=11, phase="amid").hang(rank=2).at(step=14, phase="forward")
    )

    def run(name: str, faults: Faults) -> tuple[JobRun, list[dict[str, str]]]:
        script = Script(str(WITH), ("--epochs", "2", "--logs", str(tmp_path / name)), ranks=4, steps=None)
        ended = jobs.run(script, faults, SETTINGS)
        assert ended.outcome.code == 0, ended.log(0)[-3000:]
        assert not ended.missing
        with (tmp_path / name / "version_0" / "metrics.csv").open() as lines:
            return ended, list(csv.DictReader(lines))

    clean, logged = run("clean", Faults())
    faulty, again = run("faulty", faults)

    assert again == logged
    assert len(faulty.incidents) == 3
    assert not clean.incidents
    assert float(logged[-2]["accuracy"] or logged[-1]["accuracy"]) > 0.8
