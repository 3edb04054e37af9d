"""FSDP2 over one mesh dimension, so that no rank holds another one's shards: any rank may die at any place of a step.

A rank whose newest shards are on its buddy costs nothing. One that dies before they are there sends all ranks back one step, which each of
them has in a copy of its own, so that the run from there on, and hence its end, is bit for bit the one without the fault.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from instep import drill
from instep.injection import POINTS
from instep.testing.faults import Faults
from instep.testing.finals import same
from instep.testing.jobs import JobRun, Jobs
from tests.recovery.sharded import harness
from tests.recovery.sharded.harness import Layout

JOB = str(Path(__file__).with_name("buddy_job.py"))
THREE = Layout("fsdp-3", ("--mesh", "3"), ranks=3, job=JOB)
FOUR = Layout("fsdp-4", ("--mesh", "4"), ranks=4, job=JOB)
SETTINGS = {**harness.SETTINGS, "plugins.state_replica": {"buddies": True}}
IN_STEP = ("step", "validation", "forward", "backward", "record", "prepared", "barrier", "body", "amid", "after")
CROWD = 8


def check(job: Jobs, layout: Layout, faults: Faults, *, extra: tuple[str, ...] = (), lost: Sequence[int] = ()) -> JobRun:
    """Run with faults: each happens but those with an id in ``lost``, and but for at most one step done again nothing can be told."""
    length = max(i.step or 0 for i in faults) + 4
    script = layout.script(length)
    clean, other = job.clean(script, SETTINGS), job.run(replace(script, args=(*extra, *script.args)), faults, SETTINGS)
    same(clean, other, tuple(faults), name=layout.name, ranks=layout.ranks, lost=lost, steps_lost=1)
    difference = drill.compare(clean.trace, other.trace, resumed=drill.resumed(other.incidents))
    assert difference is None, f"{layout.name}: {difference}"
    return other


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", [pytest.param(THREE, marks=pytest.mark.full), FOUR], ids=str)
def test_victims_in_turn(job: Jobs, layout: Layout) -> None:
    """One fault a step at each place, the ranks taking turns. A death before the first copies starts the job again, at no cost."""
    faults = Faults()
    for index, place in enumerate(IN_STEP):
        faults.kill(rank=index % layout.ranks).at(step=1 + index, mark=place)
    check(job, layout, faults)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["raise", pytest.param("hang", marks=pytest.mark.full)])
def test_other_faults_in_turn(job: Jobs, kind: str) -> None:
    """An exception in the body leaves a rank torn whose shards nobody else has: its own copy serves."""
    faults = Faults()
    for index, place in enumerate(("backward", "barrier", "body", "after")):
        faults.add("raise" if kind == "raise" else "hang", rank=index % 3, birth=None, step=2 * index + 1, point=place)
    check(job, THREE, faults)


@pytest.mark.timeout(120)
def test_a_copy_that_was_there_costs_nothing_and_one_that_was_not_costs_a_step(job: Jobs) -> None:
    """The victim dies right behind its commit, before its buddy has what it committed, and once behind the first collective after."""
    late = check(job, THREE, Faults().kill(rank=1).at(step=4, phase="step"), extra=("--slow", "1@4"))
    (incident,) = late.incidents
    assert (incident.scope, incident.step, incident.steps_lost) == ("in_process", 3, 1)

    there = check(job, THREE, Faults().kill(rank=1).at(step=4, phase="prepared"))
    (incident,) = there.incidents
    assert (incident.step, incident.steps_lost) == (4, 0)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_owner_and_buddy_in_a_row(job: Jobs) -> None:
    """The second one dies in the next step, when everything was sent again; then a third time around."""
    faults = Faults()
    for index, rank in enumerate((0, 1, 2, 0, 2, 1)):
        faults.kill(rank=rank).at(step=2 + index, phase="backward" if index % 2 else "amid")
    check(job, THREE, faults)


@pytest.mark.timeout(120)
def test_two_victims_that_are_no_buddies(job: Jobs) -> None:
    """In one step and at one place, and the second amid the recovery from the first. The second may be cut before it gets there."""
    faults = Faults()
    for index, place in enumerate(("backward", "barrier", "body", "after")):
        for rank in (index % 2, index % 2 + 2):
            faults.kill(rank=rank).at(step=2 * index + 1, phase=place)
    check(job, FOUR, faults, lost=range(1, len(faults) + 1))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("first", "phases"),
    [
        ("amid", ("mid_transfer",)),
        pytest.param("amid", ("connect", "restore", "verify"), marks=pytest.mark.full),
        pytest.param("backward", ("connect", "restore", "verify"), marks=pytest.mark.full),
    ],
)
def test_a_second_victim_in_each_phase_of_the_recovery(job: Jobs, first: str, phases: Sequence[str]) -> None:
    """``amid`` sends all ranks back, so that the second victim and all others are half restored when it dies."""
    for phase in phases:
        faults = Faults().kill(rank=0).at(step=3, phase=first).kill(rank=2, birth=0).at(step=None, phase=phase)
        done = check(job, FOUR, faults)
        assert [len(i.attempts) for i in done.incidents] == [2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "second"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.full)])
def test_owner_and_buddy_at_once_are_named(job: Jobs, victim: int, second: int) -> None:
    """The only copy of rank 0's shards dies with rank 1, before they were fetched or sent again."""
    faults = Faults().kill(rank=victim).at(step=3, phase="backward").kill(rank=second, birth=0).at(step=None, phase="connect")
    ended = job.run(THREE.script(7), faults, SETTINGS)

    assert ended.outcome.code == 70
    assert "shard group 'shards@0' of rank 0 has no replica left among ranks [0], and nobody keeps a copy" in ended.outcome.message


@pytest.mark.timeout(120)
def test_a_copy_that_changed_in_memory_is_found_and_not_used(job: Jobs) -> None:
    """Rank 2 keeps rank 1's shards, and a bit of them flips: the attempt fails by name, and the next one goes back to the copy before."""
    done = check(job, THREE, Faults().kill(rank=1).at(step=4, phase="backward"), extra=("--altered", "2@4"))
    (incident,) = done.incidents
    assert [attempt.failed_phase for attempt in incident.attempts] == ["restore_state", None]
    assert "the copy of shard group 'shards@1' of step 4 has changed in memory" in incident.attempts[1].fault.detail
    assert (incident.step, incident.steps_lost) == (3, 1)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [THREE, FOUR], ids=str)
def test_every_rank_before_and_after_every_collective(job: Jobs, layout: Layout) -> None:
    counts = [job.clean(layout.script(CROWD + 4), SETTINGS).trace.steps[2, rank][0] for rank in range(layout.ranks)]
    every = [(r, f"{place}#{k}") for r, n in enumerate(counts) for k, place in itertools.product(range(1, n + 1), harness.PLACES)]
    every += [(r, place) for r in range(layout.ranks) for place in IN_STEP if place in POINTS]
    for start in range(0, len(every), CROWD):
        faults = Faults()
        for index, (rank, place) in enumerate(every[start : start + CROWD]):
            # Every other step: a victim right behind a commit could be the buddy of one that died in it, which nothing survives.
            faults.kill(rank=rank).at(step=1 + 2 * index, phase=place)
        check(job, layout, faults)
