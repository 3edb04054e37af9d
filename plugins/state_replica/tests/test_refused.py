"""State that must not be taken over: each way in which it can be wrong is found, and named; nobody goes on with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from damage import Damage
from replica_worker import Digests, Orders, Outcome, Spec
from replica_world import World

Make = Callable[..., World]
SQUARE = Spec("replica", (0, 1, 2), width=16, out=16)
"""Two layers of one shape: exchanged ones fit."""


def replaced(make_world: Make, spec: Spec, own: Spec) -> tuple[dict[int, Outcome], Digests, Digests]:
    """Rank 2 is lost, and its replacement builds ``own`` instead: the outcomes, its digests before, and those of the donors."""
    world = make_world(len(spec.replicas))
    good = {world.state(rank, 5, specs=[spec]) for rank in spec.replicas}
    assert len(good) == 1
    before = world.state(2, 0, specs=[own])
    plan = world.plan(2)
    return world.recover({r: Orders(plan, fresh=r == 2, seconds=2) for r in spec.replicas}), before, good.pop()


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            {"dtype": "float64"},
            "model.first.weight: torch.float32 of shape (16, 16) on the donor, torch.float64 of shape (16, 16) on this rank",
        ),
        ({"width": 8}, "model.first.weight: torch.float32 of shape (16, 16) on the donor, torch.float32 of shape (8, 8) on this rank"),
        ({"layers": ("first", "third")}, "optimizer: parameter 2 is 'model.second.weight' on the donor, 'model.third.weight' on this rank"),
        ({"layers": ("first", "second", "third")}, "optimizer: the donor's parameter groups have [4] parameters, this rank's have [6]"),
        ({"layers": ("second", "first"), "optimized": ("first", "second")}, "model.first.weight on the donor, model.second.weight on this"),
        ({"optimized": ("second", "first")}, "optimizer: parameter 0 is 'model.first.weight' on the donor, 'model.second.weight' on this"),
        ({"optimized": ("first",)}, "optimizer: the donor's parameter groups have [4] parameters, this rank's have [2]"),
        ({"schedule": True}, "schedule: protected on this rank, but not on the donor"),
    ],
)
def test_a_replacement_that_was_built_otherwise(make_world: Make, own: dict[str, object], says: str) -> None:
    out, before, good = replaced(make_world, SQUARE, replace(SQUARE, **own))  # type: ignore[arg-type]
    assert says in out[2].error
    assert out[2].digest == before
    # The donors wait for it in vain, and keep what they have.
    assert all(out[r].error and out[r].digest == good for r in (0, 1))


def test_the_same_replacement_built_alike(make_world: Make) -> None:
    out, _, good = replaced(make_world, SQUARE, SQUARE)
    assert {(o.error, o.digest) for o in out.values()} == {("", good)}


@pytest.mark.parametrize(
    ("altered", "says"),
    [
        (1, "shard group 'replica': ranks [1] differ from ranks [0, 2, 3]"),
        # What was altered on rank 0 went to rank 3, which is no witness of it.
        (0, "shard group 'replica': ranks [0, 3] differ from ranks [1, 2]"),
    ],
)
def test_a_donor_altered_before_the_fault_is_named(make_world: Make, altered: int, says: str) -> None:
    world = make_world(4)
    for rank in range(4):
        world.state(rank, 5)
    # The first value of all, which lies in the stripe of rank 0.
    world.tamper(altered)
    world.state(3, 0)
    plan = world.plan(3)
    out = world.recover({r: Orders(plan, fresh=r == 3) for r in range(4)})
    assert all(says in o.error for o in out.values())


@pytest.mark.parametrize("altered", [0, 1])
def test_of_two_donors_that_differ_both_are_named(make_world: Make, altered: int) -> None:
    world = make_world(3)
    for rank in range(3):
        world.state(rank, 5)
    world.tamper(altered)
    world.state(2, 0)
    plan = world.plan(2)
    out = world.recover({r: Orders(plan, fresh=r == 2) for r in range(3)})
    # Rank 2 got the altered value or the other one from rank 0: either way it agrees with rank 0, and proves nothing.
    says = "shard group 'replica': ranks [0, 2] and ranks [1] differ (ranks [2] hold what they were given)"
    assert all(says in o.error for o in out.values())


def test_two_replicas_that_differ_are_both_named(make_world: Make) -> None:
    world = make_world(2)
    for rank in range(2):
        world.state(rank, 5)
    world.tamper(1)
    plan = world.plan()
    out = world.recover({r: Orders(plan) for r in range(2)})
    assert all("shard group 'replica': ranks [0] and ranks [1] differ" in o.error for o in out.values())


SERVER = (0, 16, 48, 49, 56, 57, 65, 300, 3000, 3945)
"""Bytes of the greeting, the answer, the schema's length, its digest, the schema, tensors."""
CLIENT = (0, 8, 16, 39, 71, 72, 73, 81, 89, 97, 112, 113)
"""Bytes of the hello, the proof, each field of the request, its digest, the acknowledgement."""


@pytest.mark.parametrize(("client", "ats"), [(False, SERVER), (True, CLIENT)])
def test_any_bit_that_flips_on_the_way_is_found(make_world: Make, client: bool, ats: tuple[int, ...]) -> None:
    """In both connections of the replacement to its donor: for the schema, and for the tensors."""
    world = make_world(2)
    spec = [Spec("replica", (0, 1), width=16)]
    world.state(0, 5, specs=spec)
    own = world.state(1, 4, specs=spec)
    for at in ats:
        damage = Damage(world.ports[0], at, client=client)
        try:
            plan = world.plan(1, ports={0: damage.port})
            out = world.recover({r: Orders(plan, seconds=1) for r in range(2)})
        finally:
            damage.close()
        assert damage.flipped, f"byte {at} never passed"
        assert any(o.error for o in out.values()), f"a bit of byte {at} flipped, and nobody saw it"
        assert all("rank" in o.error for o in out.values() if o.error)
        assert out[1].digest == own, f"byte {at}"


def test_without_digests_of_stripes_the_comparison_finds_it(make_world: Make) -> None:
    world = make_world(3, digest_stripes=0)
    for rank in range(3):
        world.state(rank, 5)
    damage = Damage(world.ports[1], 3000)
    try:
        plan = world.plan(2, ports={1: damage.port})
        out = world.recover({r: Orders(plan) for r in range(3)})
    finally:
        damage.close()
    assert damage.flipped
    assert all("shard group 'replica': ranks [2] differ from ranks [0, 1]" in o.error for o in out.values())
    assert [o.verified for o in out.values()] == [[False]] * 3
