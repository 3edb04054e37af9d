"""A torchrun script that knows nothing of instep: it restarts as a whole, fast, and resumes from its own checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.recovery import processes

SCRIPT = Path(__file__).parents[2] / "examples" / "torchrun_plain.py"
STARTED = re.compile(r"rank (\d+) pid (\d+) starts at step (\d+)")


def test_a_killed_rank_restarts_all_within_a_second(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-m", "instep", "run", "--nproc-per-node", "4", "--max-restarts", "1", str(SCRIPT)]
    command += ["--directory", str(tmp_path / "checkpoints"), "--steps", "100", "--every", "20", "--pause", "0.01"]
    with output.open("w") as file:
        agent = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        processes.wait_for(lambda: "step 30 " in output.read_text(), seconds=30, what="step 30")
        first = {int(rank): int(pid) for rank, pid, _ in STARTED.findall(output.read_text())}
        os.kill(first[2], signal.SIGKILL)
        killed = time.monotonic()
        processes.wait_for(lambda: _starts(output) == 8, seconds=20, what="all ranks to run again")
        seconds = time.monotonic() - killed
        assert agent.wait(30) == 0, output.read_text()
    finally:
        processes.end({agent.pid} | processes.descendants(agent.pid))
        agent.wait(10)
    again = [int(step) for _, _, step in STARTED.findall(output.read_text())][4:]
    assert len(set(again)) == 1
    assert again[0] in (20, 40)
    assert seconds < 1.0
    assert "step 100 " in output.read_text()


def _starts(output: Path) -> int:
    return len(STARTED.findall(output.read_text()))
