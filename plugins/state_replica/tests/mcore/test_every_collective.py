"""Every collective of a step, each rank killed before it and after it: enumerated by number, in every layout.

A job takes one fault every other step. With ``-m full`` (``make test-megatron``) every rank dies at every place; by default the victims
take turns, in the layouts that differ most.
"""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from mcore_harness import CROWD, GAP, LAYOUTS, Layout, check, collectives

from instep.testing.faults import Faults
from instep.testing.jobs import Jobs

PLACES = ("issue", "complete")
QUICK = {"dp4-2-instances": 8, "pp2-dp2": 8}
"""Faults by default, spread over all places of a layout."""


def crowds(every: Sequence[tuple[int, str]]) -> Iterator[Faults]:
    for start in range(0, len(every), CROWD):
        faults = Faults()
        for index, (rank, place) in enumerate(every[start : start + CROWD]):
            faults.kill(rank=rank).at(step=GAP * (index + 1), phase=place)
        yield faults


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.name in QUICK], ids=str)
def test_victims_in_turn(jobs: Jobs, layout: Layout) -> None:
    """A last fault, at the collective behind the last one, never happens: there are as many as the clean run has counted."""
    last = min(collectives(jobs, layout))
    places = [(k, where) for k in range(1, last + 1) for where in PLACES]
    number = QUICK[layout.name]
    chosen = [places[i * len(places) // number] for i in range(number)]
    (faults,) = crowds([(i % layout.ranks, f"{where}#{k}") for i, (k, where) in enumerate(chosen)])
    never = faults.kill(rank=0).at(step=GAP * (len(chosen) + 1), phase=f"issue#{last + 1}").placed[-1].id
    done = check(jobs, layout, faults, lost=[never])

    assert [fault.id for fault in done.missing] == [never]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_at_every_collective(jobs: Jobs, layout: Layout) -> None:
    counts = collectives(jobs, layout)
    every = [(r, f"{where}#{k}") for r, count in enumerate(counts) for k, where in itertools.product(range(1, count + 1), PLACES)]
    for faults in crowds(every):
        check(jobs, layout, faults)
