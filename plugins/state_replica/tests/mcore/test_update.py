"""The update: before it, amid it and behind it, with one victim and two, once and again during the recovery."""

import itertools

import pytest
from mcore_harness import GAP, LAYOUTS, TWINS, Layout, check, run

from instep.testing.faults import Faults
from instep.testing.jobs import Jobs

PLACES = ("forward", "backward", "record", "prepared", "barrier", "body", "amid", "applied", "after", "step")
IN_RECOVERY = ("connect", "restore", "publish", "verify")
QUICK = {"tp2-dp2", "plain"}
PAIRS = ((0, 1), (0, 3), (1, 2), (2, 3))
"""Ranks of which neither is the other's twin, with two instances of two ranks each."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [pytest.param(x, marks=[] if x.name in QUICK else [pytest.mark.full], id=x.name) for x in LAYOUTS])
def test_victims_in_turn(jobs: Jobs, layout: Layout) -> None:
    faults = Faults()
    for index, place in enumerate(PLACES):
        faults.kill(rank=index % layout.ranks).at(step=GAP * (index + 1), phase=place)
    check(jobs, layout, faults)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_victim(jobs: Jobs, layout: Layout) -> None:
    for shift in range(1, layout.ranks):
        faults = Faults()
        for index, place in enumerate(PLACES):
            faults.kill(rank=(index + shift) % layout.ranks).at(step=GAP * (index + 1), phase=place)
        check(jobs, layout, faults)


@pytest.mark.timeout(240)
def test_skipped_steps(jobs: Jobs) -> None:
    """A step that an overflow skips is committed like any other: its scale falls on all ranks, and nothing else moves."""
    layout = next(layout for layout in LAYOUTS if layout.name == "fp16-skipped")
    faults = Faults()
    for index, place in enumerate(("issue#3", "complete#3", "prepared", "barrier", "body", "applied", "after")):
        faults.kill(rank=index % layout.ranks).at(step=4 * index + 1, phase=place)
    check(jobs, layout, faults)


@pytest.mark.timeout(240)
def test_torn_survivors(jobs: Jobs) -> None:
    """A rank that raises inside of the update lives on with half of it: its twin gives it the rest, and its schedule moves once."""
    faults = Faults()
    for index, place in enumerate(("body", "amid", "applied", "after")):
        faults.raises(rank=index).at(step=GAP * (index + 1), phase=place)
    faults.raises(rank=0).at(step=12, phase="amid").kill(rank=3).at(step=12, phase="body")
    check(jobs, TWINS, faults, lost=[6])


@pytest.mark.timeout(240)
def test_two_victims(jobs: Jobs) -> None:
    """In one step and at one place. Not each second victim is reached: the first may end the step for all."""
    places = ("backward", "barrier", "body", "amid", "applied")
    faults = Faults()
    for index, (place, pair) in enumerate(zip(places, itertools.cycle(PAIRS), strict=False)):
        for rank in pair:
            faults.kill(rank=rank).at(step=GAP * (index + 1), phase=place)
    done = check(jobs, TWINS, faults, lost=range(1, len(faults) + 1))

    assert len(done.placed) - len(done.missing) > len(places)


@pytest.mark.timeout(240)
def test_two_faults_in_a_row(jobs: Jobs) -> None:
    """A second fault in each phase of the recovery from the first one: of a survivor that is no twin of the victim."""
    faults = Faults()
    for index, phase in enumerate(IN_RECOVERY):
        victim, second = PAIRS[index % len(PAIRS)]
        faults.kill(rank=victim).at(step=GAP * (index + 1), phase="amid")
        faults.kill(rank=second).at(step=GAP * (index + 1) + 1, phase=phase)
    done = check(jobs, TWINS, faults)

    assert len(done.incidents) == len(IN_RECOVERY)
    assert all(len(incident.attempts) == 2 for incident in done.incidents)


@pytest.mark.timeout(120)
def test_second_fault_in_the_transfer(jobs: Jobs) -> None:
    """A donor in the middle of what it sends, and a replacement in the middle of what it is given."""
    layout = next(layout for layout in LAYOUTS if layout.name == "plain")
    faults = Faults().kill(rank=0).at(step=2, phase="amid").kill(rank=1).at(step=3, phase="mid_transfer")
    faults.kill(rank=2).at(step=6, phase="body").kill(rank=2, birth=1).at(phase="mid_transfer")
    done = check(jobs, layout, faults)

    assert [len(incident.attempts) for incident in done.incidents] == [2, 2]


@pytest.mark.timeout(120)
def test_inconsistent_cut(jobs: Jobs) -> None:
    """Ranks 0 and 2 have applied step 3, 1 is cut in its barrier, and 3, its twin, is dead: 1 rolls forward, and gives to 3."""
    faults = Faults().kill(rank=3).at(step=3, phase="applied")
    done = check(jobs, TWINS, faults, extra=("--late", "1@3"))

    assert [i.step for i in done.incidents] == [4]
    assert "cut in the barrier of step 3" in done.log(1)


@pytest.mark.timeout(120)
def test_both_twins_dead(jobs: Jobs) -> None:
    """Nobody has their shard any more: the job ends and says which shard of which ranks."""
    faults = Faults().kill(rank=1).at(step=2, phase="body").kill(rank=3).at(step=2, phase="body")
    done = run(jobs, TWINS, faults)

    assert done.outcome.code == 70
    assert "megatron.dense-optimizer@1" in done.outcome.message
    assert "1, 3" in done.outcome.message
