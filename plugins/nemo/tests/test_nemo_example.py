"""The example: what it costs in lines against the same script without instep, and that faults change nothing in what it logs."""

import csv
import difflib
from pathlib import Path

import pytest
from nemo_harness import SETTINGS

from instep.testing.faults import Faults
from instep.testing.jobs import JobRun, Jobs, Script

RUNNER = Path(__file__).with_name("nemo_example.py")
EXAMPLES = next(folder / "examples" for folder in RUNNER.parents if (folder / "examples" / "train_nemo.py").exists())
WITH, WITHOUT = EXAMPLES / "train_nemo.py", EXAMPLES / "train_nemo_plain.py"


def test_lines() -> None:
    """An import, the callback, and what the script says about itself."""
    plain, protected = ([line for line in file.read_text().splitlines() if line.strip()] for file in (WITHOUT, WITH))
    added = [line[2:] for line in difflib.ndiff(plain, protected) if line.startswith("+ ")]

    assert len(added) == 3
    assert "from instep_nemo import InstepCallback" in added


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", [(), ("--peft",), ("--tensor-parallel", "2")], ids=lambda x: " ".join(x) or "dp4")
def test_same_logs(jobs: Jobs, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Without instep, with it, and with three faults."""

    def run(script: Path, faults: Faults) -> tuple[JobRun, list[dict[str, str]]]:
        logs = tmp_path / f"{script.stem}-{len(faults)}"
        words = (str(script), "--steps", "10", "--logs", str(logs), *layout)
        ended = jobs.run(Script(str(RUNNER), words, ranks=4, steps=None), faults, SETTINGS)
        assert ended.outcome.code == 0, ended.log(0)[-3000:]
        assert not ended.missing
        with (logs / "version_0" / "metrics.csv").open() as lines:
            return ended, list(csv.DictReader(lines))

    faults = (
        Faults().kill(rank=0).at(step=3, phase="backward").kill(rank=3).at(step=5, phase="amid").hang(rank=2).at(step=7, phase="forward")
    )
    plain, clean, faulty = run(WITHOUT, Faults()), run(WITH, Faults()), run(WITH, faults)

    assert clean[1] == plain[1]
    assert faulty[1] == plain[1]
    assert len(faulty[0].incidents) == 3
    assert float(plain[1][0]["reduced_train_loss"]) > float(plain[1][9]["reduced_train_loss"])
