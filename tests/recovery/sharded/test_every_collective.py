"""Every collective of a step of HSDP, each rank killed before it and after it: enumerated by number, validation included.

A job takes one fault a step. With ``-m full`` every rank dies at every place; by default the victims take turns.
"""

import itertools

import pytest

from instep.testing.faults import Faults
from instep.testing.jobs import Jobs
from tests.recovery.sharded.harness import HSDP, HSDP_SIX, PLACES, Layout, check, collectives, in_crowds

CROWD = 14
"""Faults in one job."""
STEPS = CROWD + 3


@pytest.mark.timeout(180)
def test_victims_in_turn(job: Jobs) -> None:
    """At each place one rank; the next place takes the next one."""
    places = [(k, where) for k in range(1, min(collectives(job, HSDP)) + 1) for where in PLACES]
    for faults in in_crowds([(i % HSDP.ranks, f"{where}#{k}") for i, (k, where) in enumerate(places)], CROWD):
        check(job, HSDP, faults, steps=STEPS)


@pytest.mark.full
@pytest.mark.timeout(180)
def test_victims_in_turn_of_six(job: Jobs) -> None:
    """Every third place, on a mesh whose rows are longer than its columns."""
    places = [(k, PLACES[k % 2]) for k in range(1, min(collectives(job, HSDP_SIX)) + 1, 3)]
    for faults in in_crowds([(5 - i % HSDP_SIX.ranks, f"{where}#{k}") for i, (k, where) in enumerate(places)], CROWD):
        check(job, HSDP_SIX, faults, steps=STEPS)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [HSDP, HSDP_SIX], ids=str)
def test_every_rank_at_every_collective(job: Jobs, layout: Layout) -> None:
    counts = collectives(job, layout)
    every = [(r, f"{where}#{k}") for r, count in enumerate(counts) for k, where in itertools.product(range(1, count + 1), PLACES)]
    for faults in in_crowds(every, CROWD):
        check(job, layout, faults, steps=STEPS)


@pytest.mark.timeout(120)
def test_there_are_no_further_collectives(job: Jobs) -> None:
    """The counting is right: a fault at the collective behind the last one never happens."""
    last = collectives(job, HSDP)[0]
    faults = Faults().kill(rank=0).at(step=2, phase=f"issue#{last}").kill(rank=0).at(step=4, phase=f"issue#{last + 1}")
    check(job, HSDP, faults, steps=STEPS, lost=[2])
