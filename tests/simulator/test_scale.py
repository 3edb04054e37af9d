"""A large simulated world: what one recovery costs grows as it should."""

from instep.testing.simulator.scale import costs


def test_messages_of_a_recovery_grow_with_the_ranks() -> None:
    """Interrupt, vote, plan, join and commit: a handful for each rank, whatever the world."""
    small, large = costs(10), costs(80)
    assert 3 * 10 < small.messages < 6 * 10
    assert large.messages / 80 < 1.2 * small.messages / 10
    assert large.bytes > small.bytes > 0
    assert 0 < large.recovered < 5.0
