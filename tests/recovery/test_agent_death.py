"""The agent or its fork server is killed or stopped: nothing of the job lives on, and nothing is judged by a clock that stood still."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.recovery import processes
from tests.recovery.live import Live, live

FOREIGN = ("torchinductor_", "pymp-")
"""Made by torch on import and by multiprocessing for a data loader's sockets, in any job that is killed."""


def leftovers(job: Live, pids: set[int]) -> list[str]:
    """What the job has left in its temporary directory, and in shared memory under the number of one of its processes."""
    shared = [p.name for p in Path("/dev/shm").iterdir() if {int(n) for n in re.findall(r"\d+", p.name)} & pids]
    return [p.name for p in job.temporary.iterdir() if not p.name.startswith(FOREIGN)] + shared


def cut(pid: int) -> None:
    """Leave what torch leaves when a process is killed while it hands a tensor over."""
    Path(f"/dev/shm/torch_{pid}_1_2").touch()


@pytest.mark.parametrize("options", [[], ["--no-preload"]])
def test_nothing_outlives_a_killed_rank(tmp_path: Path, options: list[str]) -> None:
    with live(tmp_path / "job", args=["--steps", "100000", "--workers", "2"], options=options) as job:
        job.reach(3, seconds=60)
        victim = job.workers()[1]
        its = {victim, *processes.descendants(victim)}
        for pid in its:
            cut(pid)
        os.kill(victim, signal.SIGKILL)
        job.reach(job.steps(0)[-1]["step"] + 10, seconds=60)
        # Those who were not dead yet when the rank was buried are looked at with the next one.
        os.kill(job.workers()[1], signal.SIGKILL)
        processes.wait_for(lambda: len(job.incidents()) == 2, seconds=60, what="the second incident")
        processes.wait_for(lambda: not leftovers(job, its), seconds=10, what="an empty /dev/shm")


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_outlives_a_killed_agent(tmp_path: Path, workers: int) -> None:
    """SIGKILL of the agent: fork server, ranks and their data loading processes are gone within a second."""
    with live(tmp_path / "job", args=["--steps", "100000", "--workers", str(workers)]) as job:
        job.reach(3)
        everyone = processes.descendants(job.agent.pid)
        assert len(everyone) >= 1 + 3 * (1 + workers)
        for rank in job.workers().values():
            for pid in (rank, *processes.descendants(rank)):
                cut(pid)
        job.agent.kill()
        job.agent.wait(5)
        soon = 1.0 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 5.0
        processes.wait_for(lambda: not processes.alive(everyone), seconds=soon, what=f"the end of {everyone}")
        assert not leftovers(job, everyone)


def test_a_killed_fork_server_is_named_and_the_job_starts_again(tmp_path: Path) -> None:
    """Its workers die with it; before any loss that cannot be made good, `--max-restarts` lets the whole job start again."""
    with live(tmp_path / "job", args=["--steps", "60", "--pause", "0.01"], options=["--max-restarts", "1"]) as job:
        job.reach(3)
        first = job.workers()
        os.kill(job.forkserver(), signal.SIGKILL)
        assert job.agent.wait(40) == 0, job.output()
        assert not processes.alive(set(first.values()))
        assert "fork server" in job.output()


def test_without_restarts_a_killed_fork_server_ends_the_job(tmp_path: Path) -> None:
    with live(tmp_path / "job", args=["--steps", "100000", "--pause", "0.01"]) as job:
        job.reach(3)
        everyone = processes.descendants(job.agent.pid)
        os.kill(job.forkserver(), signal.SIGKILL)
        assert job.agent.wait(20) == 70, job.output()
        assert "fork server" in job.output()
        assert not processes.alive(everyone)


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=[pytest.mark.full, pytest.mark.timeout(120)])])
def test_a_stopped_agent_judges_nobody_when_it_wakes(tmp_path: Path, seconds: int) -> None:
    """The ranks train on while the agent stands still, and no silence is held against them afterwards."""
    with live(tmp_path / "job", args=["--steps", "100000"], settings={"watchdog.stall": 1.0}) as job:
        job.reach(3)
        ranks = job.workers()
        os.kill(job.agent.pid, signal.SIGSTOP)
        time.sleep(seconds)
        stopped_at = job.steps(0)[-1]["step"]
        os.kill(job.agent.pid, signal.SIGCONT)
        job.reach(stopped_at + 20)
        time.sleep(1.5)
        assert job.workers() == ranks
        assert not job.incidents()


def test_a_rank_killed_while_the_agent_is_stopped_comes_back(tmp_path: Path) -> None:
    with live(tmp_path / "job", args=["--steps", "100000"], settings={"watchdog.stall": 1.0}) as job:
        job.reach(3)
        os.kill(job.agent.pid, signal.SIGSTOP)
        os.kill(job.workers()[1], signal.SIGKILL)
        time.sleep(2)
        at = job.steps(0)[-1]["step"]
        os.kill(job.agent.pid, signal.SIGCONT)
        job.reach(at + 10)
        (incident,) = job.incidents()
        assert incident["fault"]["ranks"] == [1]  # type: ignore[index]


def test_a_stopped_fork_server_delays_a_replacement_only(tmp_path: Path) -> None:
    """A replacement that the fork server does not deliver in time is started as a plain interpreter instead."""
    settings = {"watchdog.stall": 1.0, "deadlines.spawn": 1.0}
    with live(tmp_path / "job", args=["--steps", "100000"], settings=settings) as job:
        job.reach(3)
        server, victim = job.forkserver(), job.workers()[2]
        os.kill(server, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        at = job.steps(0)[-1]["step"]
        job.reach(at + 10)
        os.kill(server, signal.SIGCONT)
        assert len(job.incidents()) == 1
