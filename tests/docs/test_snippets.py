"""Every snippet of the documentation: Python runs, TOML is a configuration, command lines are known to their programs."""

import json
from pathlib import Path

import pytest

from instep import config, plugins
from instep.discovery import installed
from instep.drill import Verdict
from instep.errors import ConfigError, UsageError
from instep.testing import Faults, Jobs
from instep.testing import Script as Run

from .commands import WrongError, check
from .pages import ROOT, Fence, Script, fences, scripts, tokens

pytestmark = pytest.mark.timeout(180)  # the first job starts the fork server, on a machine that may be busy
LANGUAGES = {"python", "toml", "sh", "json", "text"}
ONE_THREAD = "import torch; torch.set_num_threads(1)"
RANKS = 2
NOT_HERE = {"mydetector"}
"""Plugins of the reader's own."""


def test_each_fence_is_of_a_language_that_is_checked() -> None:
    assert {str(fence): fence.language for fence in fences() if fence.language not in LANGUAGES} == {}
    assert {fence.language for fence in fences()} == LANGUAGES


def job_scripts() -> list[Script]:
    return [script for script in scripts() if "instep.init(" in script.source]


def other_scripts() -> list[Script]:
    return [script for script in scripts() if "instep.init(" not in script.source]


@pytest.mark.parametrize("script", job_scripts(), ids=str)
def test_a_training_script_survives_a_fault_bit_for_bit(
    script: Script, job: Jobs, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    assert not script.source.splitlines()[0], "the first line of a page is its title"
    file.write_text(ONE_THREAD + script.source)
    run = Run(str(file), ranks=RANKS, steps=None)
    fault = faults.kill(rank=1).at(step=2, phase="barrier")
    if not script.twice:
        job.drill(run, fault)
        return
    first, second = job.run(run, fault), job.run(run)
    for each in (first, second):
        assert each.outcome.code == 0, f"{each.outcome.message}\n{each.log(0)}"
    assert [incident.steps_lost for incident in first.incidents] == [0]
    assert 0 < second.outcome.steps == first.outcome.steps
    assert min(step for step, _ in second.trace.steps) > 0, "the second run began anew"


def test_what_a_replacement_sees_is_as_the_page_says(job: Jobs, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = [script for script in scripts() if script.fences[0].page.stem == "runs-twice"]
    begin, block, end = script.source.partition("@session.recoverable")
    tell = "print('SEES', first, session.incarnation, session.step, session.incidents, run)\n"
    file = tmp_path / "train.py"
    file.write_text(begin + tell + block + end + tell)
    run = job.run(Run(str(file), ranks=RANKS, steps=None), faults.kill(rank=1).at(step=2, phase="step"))
    assert run.outcome.code == 0, run.outcome.message
    seen = [line.split()[1:] for line in run.log(1).splitlines() if line.startswith("SEES")]
    assert [line[:-1] for line in seen] == [["True", "0", "0", "0"], ["False", "0", "0", "0"], ["False", "1", "10", "1"]]
    assert len({line[-1] for line in seen}) == 1
    assert "recovered 1 times, going on at step 2" in run.log(0)


@pytest.mark.parametrize("script", other_scripts(), ids=str)
def test_python(script: Script, job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs; functions that are tests are called with the fixtures that they name."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(script.source, str(script.fences[0].page), "exec"), names)
    for name, test in [*names.items()]:
        if name.startswith("test_") and callable(test):
            test(job=job, faults=Faults())


@pytest.mark.parametrize("fence", fences("toml"), ids=str)
def test_toml(fence: Fence, tmp_path: Path) -> None:
    file = tmp_path / ("pyproject.toml" if "[tool." in fence.text else "instep.toml")
    file.write_text(fence.text)
    tables = config.load(str(file), environ={}).config.plugins
    assert set(tables) <= {*installed(), *NOT_HERE}
    plugins.load(config.Config(plugins={name: table for name, table in tables.items() if name not in NOT_HERE}))


@pytest.mark.parametrize("fence", fences("json"), ids=str)
def test_json(fence: Fence) -> None:
    """The only kind so far: the verdict of a drill."""
    assert set(json.loads(fence.text)) == set(Verdict.model_fields)
    Verdict.model_validate_json(fence.text)


@pytest.mark.parametrize("fence", fences("sh"), ids=str)
def test_command_lines(fence: Fence) -> None:
    titles = [token.title for token in tokens(fence.page) if isinstance(token, Fence) and token.title]
    for line in fence.text.replace("\\\n", " ").splitlines():
        check(line, files=[*titles, "mydetector"])


@pytest.mark.parametrize(
    "line",
    [
        "instep rnu x.py",
        "instep run --nproc 2 examples/train_ddp.py",
        "instep run nowhere.py",
        "instep drill --kill 2 examples/train_ddp.py",
        "instep check --jsn",
        "INSTEP_WATCHDOG__STAL=2 instep run examples/train_ddp.py",
        "make cake",
        "pip install 'instep[cake]'",
        "rm -rf /",
    ],
)
def test_a_wrong_command_line_is_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((WrongError, SystemExit, ConfigError, UsageError)):
        check(line)


def test_lines_keep_their_numbers() -> None:
    for script in scripts():
        lines = script.source.splitlines()
        page = script.fences[0].page.read_text().splitlines()
        assert all(not line or line == page[number].strip("\n") for number, line in enumerate(lines))


def test_there_is_something_to_run() -> None:
    assert len(job_scripts()) >= 5
    assert len(other_scripts()) >= 3
