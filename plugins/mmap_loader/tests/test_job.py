"""Together with the core: a killed rank's first batch lies in the cache, and nothing of a job outlives its agent."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from things import running, wait_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_mmap.py"
ENVIRONMENT = {**os.environ, "INSTEP_PLUGINS__MMAP_LOADER": "true"}


def caches() -> set[Path]:
    return set(Path("/dev/shm").glob("instep-mmap-*/*"))


def producers(since: set[int]) -> set[int]:
    """Processes of producers and their workers that did not run before."""
    return {pid for pid in _producing() if pid not in since}


def _producing() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and running(int(path.name)):
            try:
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if b"instep_mmap_loader.boot" in words:
                yield int(path.name)


def test_a_drill_is_bitwise_equal_and_resumes_from_the_cache(tmp_path: Path) -> None:
    before = caches()
    command = ["-m", "instep", "drill", "--ranks", "2", "--steps", "24", "--kill", "1@7", "0@15", "--json", "--report-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *command, str(EXAMPLE)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["bitwise_equal"]
    assert verdict["steps"] == 24
    assert len(verdict["incidents"]) == 2
    for incident in verdict["incidents"]:
        resumed = {phase["rank"]: phase for phase in incident["phases"] if phase["phase"] == "resume_data"}
        assert set(resumed) == {0, 1}
        for phase in resumed.values():
            assert phase["plugin"] == "mmap_loader"
            assert phase["bytes"] > 0
    wait_for(lambda: caches() <= before, seconds=1, what="an empty directory")


@pytest.mark.parametrize("plugin", ["true", pytest.param("false", marks=pytest.mark.full)])
def test_nothing_outlives_a_killed_agent(tmp_path: Path, plugin: str) -> None:
    """No process and no file a second after, whether or not the plugin is enabled; the producers are no descendants of the agent."""
    before, others = caches(), set(_producing())
    command = [sys.executable, "-m", "instep", "run", "--nproc-per-node", "2", str(EXAMPLE), "--epochs", "100000"]
    with (tmp_path / "log").open("w") as log:
        environment = {**ENVIRONMENT, "INSTEP_PLUGINS__MMAP_LOADER": plugin}
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "step   20" in (tmp_path / "log").read_text(), seconds=40, what="the first steps")
        ours = producers(others)
        assert len(ours) == 4
        agent.kill()
        time.sleep(1.0)
        assert not {pid for pid in ours if running(pid)}
        assert caches() <= before
    finally:
        agent.kill()
        agent.wait(5)
