"""Several shard groups in one recovery, over different replicas."""

from collections.abc import Callable

import pytest
from replica_worker import Digests, Orders, Spec
from replica_world import World

pytestmark = pytest.mark.timeout(180)  # real processes on a busy machine
Make = Callable[..., World]
HSDP = {"replica": (0, 1, 2, 3), "shards@0": (0, 2), "shards@1": (1, 3)}
CROSSED = {"replica": (0, 1, 2, 3), "rows@0": (0, 1), "rows@2": (2, 3), "columns@0": (0, 2), "columns@1": (1, 3)}


def seeded(make_world: Make, groups: dict[str, tuple[int, ...]], size: int = 4, *, width: int = 64) -> tuple[World, dict[int, Digests]]:
    """A world whose ranks are all after five steps, and their digests."""
    world = make_world(size, groups=groups)
    return world, {rank: world.state(rank, 5, width=width) for rank in range(size)}


def size_of(width: int) -> int:
    """Bytes of one group: two matrices, two vectors; AdamW's two moments of each, and its four step counters."""
    return 4 * 3 * (width * width + width + 3 * width + 3) + 4 * 4


@pytest.mark.parametrize(("lost", "donors"), [(2, 3 + 1), (1, 3 + 1)])
def test_a_newcomer_draws_each_group_from_its_own_replicas(make_world: Make, lost: int, donors: int) -> None:
    world, digests = seeded(make_world, HSDP)
    world.state(lost, 0)
    plan = world.plan(lost)
    out = world.recover({r: Orders(plan, fresh=r == lost) for r in range(4)})
    assert {o.error for o in out.values()} == {""}
    assert {r: o.digest for r, o in out.items()} == digests
    assert out[lost].received == 2 * size_of(64)
    twin = (lost + 2) % 4
    served = {r: o.points.count("mid_transfer") for r, o in out.items()}
    # The twin serves both groups, the two others the world's only.
    assert served == {r: donors if r == lost else 2 if r == twin else 1 for r in range(4)}


def test_two_newcomers_that_draw_from_different_ranks(make_world: Make) -> None:
    world, digests = seeded(make_world, CROSSED)
    for rank in (0, 3):
        world.state(rank, 2)
    plan = world.plan(0, 3)
    assert plan.donors == {"replica": (1, 2), "rows@0": (1,), "rows@2": (2,), "columns@0": (2,), "columns@1": (1,)}
    out = world.recover({r: Orders(plan, torn=r == 3) for r in range(4)})
    assert {o.error for o in out.values()} == {""}
    assert {r: o.digest for r, o in out.items()} == digests
    assert [out[r].received for r in range(4)] == [3 * size_of(64), 0, 0, 3 * size_of(64)]


def test_no_common_group_and_ranks_with_different_numbers_of_them(make_world: Make) -> None:
    world, digests = seeded(make_world, {"a": (0, 2), "b": (1, 3), "c": (1, 3)})
    world.state(3, 0)
    plan = world.plan(3)
    out = world.recover({r: Orders(plan, fresh=r == 3) for r in range(4)})
    assert {o.error for o in out.values()} == {""}
    assert {r: o.digest for r, o in out.items()} == digests
    # Nothing is asked of the others.
    assert out[0].points == out[2].points == ["restore", "verify"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_donor_killed_amid_its_groups(make_world: Make, victim: int) -> None:
    """Stale rank 2 draws the world's group from ranks 0, 1 and 3, its shards from rank 0 alone."""
    world, digests = seeded(make_world, HSDP, width=500)
    own = world.state(2, 4, width=500)
    plan = world.plan(2)
    out = world.recover({r: Orders(plan, kill_at="mid_transfer" if r == victim else "", seconds=3) for r in range(4)})
    assert victim not in out
    assert out[2].error.startswith(f"CommsError: transfer of state with rank {victim} failed")
    assert out[2].digest == own, "a rank that was not torn before was half restored"
    world.replace(victim)
    world.state(victim, 0, width=500)
    if victim == 0:
        return  # Both replicas of a shard group are gone: another rung's matter.
    plan = world.plan(1, 2)
    out = world.recover({r: Orders(plan, fresh=r == 1) for r in range(4)})
    assert {o.error for o in out.values()} == {""}
    assert {r: o.digest for r, o in out.items()} == digests


def test_a_group_that_the_donor_has_not_is_named(make_world: Make) -> None:
    world, _ = seeded(make_world, HSDP)
    made = world.plan(2)
    # Core's plan refuses such votes; another plugin's may not.
    plan = made.model_copy(update={"donors": {**made.donors, "extra@0": (0,)}})
    more = Spec("extra@0", (0, 2), layouts=False)
    world.state(2, 0, specs=[*world.specs(2), more])
    out = world.recover({r: Orders(plan, fresh=r == 2, seconds=2) for r in range(4)})
    # Whichever of its connections with rank 0 rank 2 looks at first.
    assert "rank 0 has no shard group 'extra@0', which rank 2 has" in out[2].error or "closed by the other side" in out[2].error
    assert "rank 2 asked rank 0 for a shard group that it has not; it has ['replica', 'shards@0']" in out[0].error


def test_a_group_that_the_newcomer_has_not_is_named(make_world: Make) -> None:
    world, _ = seeded(make_world, HSDP)
    made = world.plan(2)
    plan = made.model_copy(update={"donors": {"replica": (0, 1, 3), "shards@0": (), "shards@1": ()}})
    world.state(2, 0, specs=world.specs(2)[:1])
    out = world.recover({r: Orders(plan, fresh=r == 2, seconds=2) for r in range(4)})
    assert "shard group 'shards@0': ranks [2] restore it, and the plan has no donor" in out[0].error
    assert out[2].error


def test_the_odd_rank_of_one_group_is_named(make_world: Make) -> None:
    world, _ = seeded(make_world, {"replica": (0, 1, 2, 3, 4), "a": (0, 1, 2), "b": (3, 4)}, 5)
    world.tamper(1, "a")
    plan = world.plan()
    out = world.recover({r: Orders(plan) for r in range(5)})
    assert {o.error for o in out.values()} == {
        "InstepError: after the recovery to step 7: shard group 'a': ranks [1] differ from ranks [0, 2]"
    }
    world.tamper(4, "b")
    plan = world.plan()
    out = world.recover({r: Orders(plan) for r in range(5)})
    assert all("ranks [1] differ from ranks [0, 2]" in o.error for o in out.values())
    assert all("shard group 'b': ranks [3] and ranks [4] differ" in o.error for o in out.values())


def test_replicas_that_count_each_other_differently_are_named(make_world: Make) -> None:
    world, _ = seeded(make_world, {"a": (0, 1, 2)}, 3)
    plan = world.plan()
    world.state(2, 5, specs=[Spec("a", (2,))])
    out = world.recover({r: Orders(plan) for r in range(3)})
    assert "shard group 'a': rank 2 counts ranks [2], it is on ranks [0, 1, 2]" in out[2].error
