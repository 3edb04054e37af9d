"""One job with 200 recoveries in a row: nothing piles up in the survivors, and nothing is left afterwards."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.recovery import processes
from tests.recovery.live import Live, live
from tests.recovery.test_agent_death import leftovers

RECOVERIES = 200


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_hundred_recoveries_leave_nothing(tmp_path: Path) -> None:
    """Rank 1 is killed again and again; ranks 0 and 2 survive all of it. Threads and files flat, memory under 30 MB from the 50th on."""
    marks: dict[int, int] = {}
    with live(tmp_path / "job", args=["--steps", "1000000"]) as job:
        job.reach(5)
        survivors = {rank: pid for rank, pid in job.workers().items() if rank != 1}
        most = max(job.steps(rank)[-1]["threads"] for rank in survivors) + 1
        for count in range(1, RECOVERIES + 1):
            os.kill(job.workers()[1], 9)
            at = job.steps(0)[-1]["step"]
            processes.wait_for(lambda n=count: len(job.incidents()) >= n, seconds=20, what=f"recovery {count}")  # type: ignore[misc]
            job.reach(at + 3)
            if count in (50, RECOVERIES):
                processes.wait_for(lambda: _rested(job, survivors, most), seconds=60, what="old communicators to end")
                marks[count] = job.steps(0)[-1]["step"]
                job.reach(marks[count] + 1)
                zombies = {pid for pid in processes.descendants(job.agent.pid) if processes.state(pid) == "Z"}
                assert not zombies
        assert {rank: job.workers()[rank] for rank in survivors} == survivors
        samples = {rank: {line["step"]: line for line in job.steps(rank)} for rank in survivors}
        job.agent.terminate()
        job.agent.wait(60)
        assert not leftovers(job, set(survivors.values()))
    for rank, lines in samples.items():
        early, late = lines[marks[50]], lines[marks[RECOVERIES]]
        assert late["threads"] <= early["threads"] + 1, (rank, early, late)
        assert late["files"] <= early["files"] + 2, (rank, early, late)
        assert late["rss"] - early["rss"] < 30 * 1024, (rank, early, late)
    assert {p.name for p in (tmp_path / "job").iterdir()} <= {"output", "report", "tmp", *(f"stats-{rank}.jsonl" for rank in range(3))}


def _rested(job: Live, survivors: Iterable[int], most: int) -> bool:
    """Whether nobody has more than ``most`` threads: each communicator that is not dropped yet has some of its own."""
    return all(job.steps(rank)[-1]["threads"] <= most for rank in survivors)
