"""Together with the core: a killed rank's first batch lies in the cache, and nothing of a job outlives its agent."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from things import running, wait_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_mmap.py"
pytestmark = pytest.mark.timeout(240)


def producers(directory: Path) -> Iterator[int]:
    """Processes of producers, and of their workers, whose cache lies in a directory."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and running(int(path.name)):
            try:
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if b"instep_mmap_loader.boot" in words and str(directory).encode() in words:
                yield int(path.name)


def test_a_drill_is_bitwise_equal_and_resumes_from_the_cache(tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    caches.mkdir()
    environment = {**os.environ, "INSTEP_PLUGINS__MMAP_LOADER": json.dumps({"directory": str(caches)})}
    command = ["-m", "instep", "drill", "--ranks", "2", "--steps", "24", "--kill", "1@7", "--kill", "0@15", "--json", "--report-dir"]
    script = [str(tmp_path / "reports"), str(EXAMPLE), "--workers", "2"]
    done = subprocess.run([sys.executable, *command, *script], env=environment, capture_output=True, text=True, timeout=200)
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
    assert not list(caches.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("plugin", ["true", "false"])
def test_nothing_outlives_a_killed_agent(tmp_path: Path, plugin: str) -> None:
    """No process and no file, whether or not the plugin is enabled; the producers are no descendants of the agent."""
    caches = tmp_path / "caches"
    caches.mkdir()
    command = [
        sys.executable,
        "-m",
        "instep",
        "run",
        "--nproc-per-node",
        "2",
        str(EXAMPLE),
        "--epochs",
        "100000",
        "--directory",
        str(caches),
    ]
    with (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "INSTEP_PLUGINS__MMAP_LOADER": plugin}
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "step   20" in (tmp_path / "log").read_text(), what="the first steps")
        ours = set(producers(caches))
        assert len(ours) == 4
        agent.kill()
        # Well before their patience with dead readers ends. A process on its way out has no command line any more.
        wait_for(lambda: not list(producers(caches)) and not any(map(running, ours)), seconds=15, what="the end of the producers")
        assert not list(caches.iterdir())
    finally:
        agent.kill()
        agent.wait(5)
