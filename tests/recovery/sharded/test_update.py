"""The update of HSDP: before it, amid it and behind it, with each kind of fault, with two victims, and again during the recovery."""

import itertools

import pytest

from instep.testing.faults import Faults, Kind
from instep.testing.jobs import Jobs
from tests.recovery.sharded.harness import HSDP, HSDP_SIX, Layout, check, run

PLACES = ("step", "validation", "forward", "backward", "record", "prepared", "barrier", "body", "amid", "after")
IN_RECOVERY = ("connect", "restore", "verify")
STEPS = 2 * len(PLACES)
KINDS: tuple[Kind, ...] = ("kill", "raise", "hang")
PAIRS = ((0, 1), (0, 3), (1, 2), (2, 3))
"""Ranks of which neither is the other's twin: 0 and 2 hold equal shards, and 1 and 3."""


def turns(kind: Kind, ranks: int, *, shift: int = 0) -> Faults:
    """One fault a step, at each place, the ranks taking turns. From step 0 on, where optimizers have no state yet."""
    faults = Faults()
    for index, place in enumerate(PLACES):
        faults.add(kind, rank=(index + shift) % ranks, birth=None, step=index, point=place)
    return faults


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_victims_in_turn(job: Jobs, kind: Kind) -> None:
    check(job, HSDP, turns(kind, HSDP.ranks), steps=STEPS)


@pytest.mark.timeout(180)
def test_hangs(job: Jobs) -> None:
    """A hang costs its time until it is one, so there are few by default."""
    check(job, HSDP, Faults().hang(rank=3).at(step=1, phase="backward").hang(rank=0).at(step=3, phase="body"), steps=STEPS)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [HSDP, HSDP_SIX], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_victim(job: Jobs, layout: Layout, kind: Kind) -> None:
    for shift in range(layout.ranks):
        check(job, layout, turns(kind, layout.ranks, shift=shift), steps=STEPS)


@pytest.mark.timeout(180)
def test_two_victims(job: Jobs) -> None:
    """In one step and at one place. Not each second victim is reached: the first may end the step for all."""
    places = ("validation", "backward", "prepared", "barrier", "body", "amid", "after")
    faults = Faults()
    for index, (place, pair) in enumerate(zip(places, itertools.cycle(PAIRS), strict=False)):
        for rank in pair:
            faults.add("kill", rank=rank, birth=None, step=index + 1, point=place)
    done = check(job, HSDP, faults, steps=STEPS, lost=range(1, len(faults) + 1))

    assert len(done.placed) - len(done.missing) > len(places)


@pytest.mark.timeout(180)
def test_two_faults_in_a_row(job: Jobs) -> None:
    """A second fault in each phase of the recovery from the first one: of a survivor that is no twin of the victim."""
    faults = Faults()
    for index, phase in enumerate(IN_RECOVERY):
        victim, second = PAIRS[index % len(PAIRS)]
        faults.kill(rank=victim).at(step=2 * index, phase="amid").kill(rank=second).at(step=2 * index + 1, phase=phase)
    done = check(job, HSDP, faults, steps=STEPS)

    assert len(done.incidents) == len(IN_RECOVERY)
    assert all(len(incident.attempts) == 2 for incident in done.incidents)


@pytest.mark.timeout(120)
def test_a_replacement_dies_with_half_of_its_shards(job: Jobs) -> None:
    """What was half received donates nothing. A donor's death at this place would be that of the last twin."""
    faults = Faults().kill(rank=1).at(step=3, phase="amid").kill(rank=1, birth=1).at(step=None, phase="mid_transfer")
    done = check(job, HSDP, faults, steps=6)

    assert [len(incident.attempts) for incident in done.incidents] == [2]


@pytest.mark.timeout(120)
def test_inconsistent_cut(job: Jobs) -> None:
    """Ranks 0 and 2 have applied step 3, 1 is cut in its barrier, and 3, its twin, is dead: 1 rolls forward, and gives to 3.

    The newest step alone would not do: shard 0 is there only behind the step, shard 1 only before it.
    """
    faults = Faults().kill(rank=3).at(step=3, phase="after")
    done = check(job, HSDP, faults, steps=6, extra=("--late", "1@3"))

    assert [i.step for i in done.incidents] == [4]
    assert "cut in the barrier of step 3" in done.log(1)


@pytest.mark.timeout(120)
def test_both_twins_dead(job: Jobs) -> None:
    """Nobody has their shard any more: the job ends, and says which shard of which ranks."""
    faults = Faults().kill(rank=1).at(step=2, phase="body").kill(rank=3).at(step=2, phase="body")
    done = run(job, HSDP, faults, steps=6)

    assert done.outcome.code == 70
    assert "shards@1,3" in done.outcome.message
    assert "ranks [1, 3]" in done.outcome.message
