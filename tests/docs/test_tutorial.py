"""The tutorial, followed word for word: its script is written, its commands run, its rank is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from instep.testing import Jobs, Script

from .pages import DOCS, Fence, tokens

pytestmark = pytest.mark.timeout(240)
PAGE = DOCS / "tutorial" / "index.md"
HURRY = {
    "STEPS, PAUSE = 500, 0.05": "STEPS, PAUSE = 100, 0.05",
    "time.sleep(PAUSE)": "time.sleep(0.5 if session.step > 55 and not session.incarnation else 0)",
}
"""The reader needs time to type; a test does not, but the job must not end before it has killed."""
FENCES = [token for token in tokens(PAGE) if isinstance(token, Fence)]


def command(word: str) -> list[str]:
    """The page's command line that begins with ``instep WORD``, as it runs in the environment of this test."""
    (line,) = [fence.text.strip() for fence in FENCES if fence.text.startswith(f"instep {word}")]
    return [sys.executable, "-m", *line.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands, with the script written, and the torch of a test on one thread."""
    home = tmp_path_factory.mktemp("tutorial")
    (script,) = [fence for fence in FENCES if fence.title]
    text = "import torch; torch.set_num_threads(1)\n" + script.text
    for line, quicker in HURRY.items():
        assert text.count(line) == 1
        text = text.replace(line, quicker)
    (home / str(script.title)).write_text(text)
    return home


def test_kill_and_report(folder: Path) -> None:
    with subprocess.Popen(command("run"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        seen, pids, killed = "", list[int](), False
        for line in run.stdout:
            seen += line
            if match := re.search(r"kill -9 (\d+)", line):
                pids.append(int(match[1]))
            if pids and not killed and "step 50" in line:  # which is printed again if step 50 is run again
                os.kill(pids[0], signal.SIGKILL)
                killed = True
    assert run.returncode == 0, seen
    assert len(set(pids)) == len(pids) == 2, seen
    (shown,) = [fence.text for fence in FENCES if fence.text.startswith("instep: incident 1")]
    for line in shown.splitlines():
        assert re.search(re.sub(r"(kill\\ \\-9|step)\\ \d+", r"\1\\ \\d+", re.escape(line)), seen), f"{line!r} is not in:\n{seen}"
    drawn = subprocess.run(command("report"), cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "incident 1, exit of rank 2" in drawn
    assert "0 steps lost" in drawn


def test_drill(folder: Path) -> None:
    done = subprocess.run(command("drill"), cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    (verdict,) = [fence.text for fence in FENCES if fence.text.startswith("bitwise equal")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(verdict)


def test_what_was_forgotten_is_named(folder: Path, job: Jobs) -> None:
    forgetful = folder / "forgetful.py"
    script = (folder / "train.py").read_text()
    assert "model=model, optimizer=optimizer, loader" in script
    forgetful.write_text(script.replace(" optimizer=optimizer,", ""))
    outcome = job.run(Script(str(forgetful), ranks=3, steps=None)).outcome
    assert outcome.code == 1
    assert "AdamW" in outcome.message
    assert "session.protect(optimizer=...)" in outcome.message
