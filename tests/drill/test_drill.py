"""`instep drill` end to end: equal, different, not deterministic, and not drillable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, time, torch, torch.distributed as dist
import instep
session = instep.init()
"""
FORGETFUL = (
    HEAD
    + """
weight, forgotten = torch.zeros(4), torch.zeros(4)
session.protect(weight=weight)
@session.recoverable
def train():
    while session.step < 8:
        gradient = torch.full((4,), 1.0 + session.rank + forgotten.sum().item())
        dist.all_reduce(gradient)
        with session.commit():
            weight.add_(gradient)
            forgotten.add_(1.0)
train()
"""
)
UNSTEADY = (
    HEAD
    + """
weight = torch.zeros(4)
session.protect(weight=weight)
@session.recoverable
def train():
    while session.step < 8:
        gradient = torch.full((4,), time.time() % 1)
        dist.all_reduce(gradient)
        with session.commit(): weight.add_(gradient)
train()
"""
)
IDLE = HEAD + "\n@session.recoverable\ndef train(): pass\ntrain()\n"


def run(*args: str, cwd: Path, timeout: float = 50) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "instep", "drill", *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, cwd=cwd)


def verdict(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    assert done.stdout.count("\n") == 1, done.stdout
    result: dict[str, object] = json.loads(done.stdout)
    assert set(result) == {"ok", "bitwise_equal", "first_difference", "deterministic", "steps", "incidents"}
    return result


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def test_the_built_in_job_survives_every_kind_of_fault(tmp_path: Path) -> None:
    done = run("--ranks", "3", "--steps", "20", "--kill", "0@5", "2@8", "--raise", "1@12", "--hang", "2@16", "--json", cwd=tmp_path)
    found = verdict(done)
    assert done.returncode == 0, done.stderr
    assert found["ok"] is found["bitwise_equal"] is found["deterministic"] is True
    assert found["steps"] == 20
    incidents = found["incidents"]
    assert isinstance(incidents, list)
    assert [i["fault"]["kind"] for i in incidents] == ["exit", "exit", "exception", "hang"]
    assert [i["steps_lost"] for i in incidents] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_forgotten_state_is_found(tmp_path: Path) -> None:
    """A tensor that steers the gradients is not protected: the replacement starts with zeros, and the next all-reduce tells."""
    done = run("--ranks", "2", "--kill", "1@4", "--json", script(tmp_path, FORGETFUL), cwd=tmp_path)
    found = verdict(done)
    assert done.returncode == 1
    assert (found["ok"], found["bitwise_equal"], found["deterministic"]) == (False, False, True)
    difference = found["first_difference"]
    assert isinstance(difference, dict)
    assert difference["step"] in (4, 5)
    assert difference["name"] == "collectives"


def test_a_script_that_differs_from_itself_is_blamed(tmp_path: Path) -> None:
    done = run("--ranks", "2", "--raise", "1@4", "--json", script(tmp_path, UNSTEADY), cwd=tmp_path)
    found = verdict(done)
    assert done.returncode == 1
    assert (found["ok"], found["deterministic"]) == (False, False)


@pytest.mark.parametrize(
    ("args", "text", "says"),
    [
        ([], IDLE, "committed no step"),
        ([], "print('no instep here')", "committed no step"),
        (["--kill", "7@1"], IDLE, "ranks 0 to 1"),
        (["--kill", "1"], IDLE, "RANK@STEP"),
        (["--steps", "4", "--hang", "1@4"], IDLE, "steps 0 to 3"),
        (["--backend", "smoke"], IDLE, "smoke"),
    ],
)
def test_what_cannot_be_drilled_is_refused(tmp_path: Path, args: list[str], text: str, says: str) -> None:
    done = run("--ranks", "2", *args, script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    done = run("nowhere.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
