"""The simulator finds bugs: each of many that are planted in core is found within a bounded number of seeds."""

import pytest

from instep.testing.simulator import Violation, World, drawn, quiet
from tests.simulator.mutations import MUTATIONS, Mutation

BOUND = 6_000


def found(mutation: Mutation) -> tuple[int, str] | None:
    """The first seed that fails with this bug, and how."""
    with quiet(), mutation.planted():
        for seed in range(BOUND):
            try:
                World(drawn(seed)).run()
            except Violation as error:
                return seed, str(error)
    return None


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 12
    assert len({mutation.title for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.title.replace(" ", "-"))
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    """And the same seed passes without it, which also shows that the bug was taken out again."""
    result = found(mutation)
    assert result is not None, f"{mutation.title}: not found in {BOUND} seeds"
    seed, message = result
    assert f"--seed {seed} --trace" in message
    with quiet():
        World(drawn(seed)).run()


def test_a_mutation_whose_text_is_gone_is_an_error() -> None:
    outdated = Mutation("outdated", MUTATIONS[0].owner, MUTATIONS[0].name, (("no such text", ""),))
    with pytest.raises(AssertionError, match="bring it up to date"), outdated.planted():
        pass
