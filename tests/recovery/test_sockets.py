"""No store and no root: which sockets a job listens on, and that rank 0 is a rank like any other."""

from collections import Counter
from pathlib import Path

import pytest

from instep.model import Receipt
from tests.recovery import processes
from tests.recovery.harness import Fault, Jobs, Shape
from tests.recovery.live import live


def test_only_the_documented_sockets_listen(tmp_path: Path) -> None:
    """Each rank: one gloo device and one for state transfer, on loopback. Agent and fork server: none. So nobody serves a TCPStore."""
    with live(tmp_path / "job", ranks=4, args=["--steps", "100000"]) as job:
        job.reach(3)
        ranks = set(job.workers().values())
        others = {job.agent.pid, job.forkserver()}
        found = list(processes.listening(ranks | others))

    assert Counter(pid for pid, _, _ in found) == dict.fromkeys(ranks, 2)
    assert {address for _, address, _ in found} == {"127.0.0.1"}


@pytest.mark.parametrize("point", ["mid_backward", "after"])
def test_rank_0_is_like_any_other(jobs: Jobs, point: str) -> None:
    """The same fault on rank 0 and on rank 3 takes the same phases, attempts and bytes."""
    shape = Shape(ranks=4, steps=8)
    first, last = (jobs.check(shape, [Fault("kill", rank, point, step=4)]).incidents[0] for rank in (0, 3))

    assert len(first.attempts) == len(last.attempts) == 1
    assert first.bytes_moved == last.bytes_moved
    assert (first.step, first.steps_lost, first.scope) == (last.step, last.steps_lost, last.scope)
    assert _work(first.phases) == _work(last.phases)


def _work(phases: tuple[Receipt, ...]) -> Counter[tuple[str, str]]:
    return Counter((receipt.phase, receipt.plugin) for receipt in phases)
