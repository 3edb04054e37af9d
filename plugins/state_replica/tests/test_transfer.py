import socket
import struct
import time
from collections.abc import Callable

import pytest
from damage import Damage
from replica_worker import Digests, Orders
from replica_world import World

pytestmark = pytest.mark.timeout(180)  # real processes on a busy machine
Make = Callable[..., World]


def seeded(make_world: Make, size: int, *, width: int = 64, **settings: int) -> tuple[World, Digests]:
    """A world whose ranks are all after five steps, and their digests."""
    world = make_world(size, **settings)
    digests = {world.state(rank, 5, width=width) for rank in range(size)}
    assert len(digests) == 1
    return world, digests.pop()


@pytest.mark.parametrize("width", [8, 600])
def test_a_fresh_rank_draws_from_all_donors(make_world: Make, width: int) -> None:
    world, digest = seeded(make_world, 4, width=width)
    world.state(2, 0, width=width)
    plan = world.plan(2)
    out = world.recover({r: Orders(plan, fresh=r == 2) for r in range(4)})
    assert {o.error for o in out.values()} == {""}
    assert {o.digest for o in out.values()} == {digest}
    assert all(o.verified == [True, True] for o in out.values())
    # Two matrices, two vectors; AdamW's two moments of each, and its four step counters.
    assert out[2].received == 4 * 3 * (width * width + width + 3 * width + 3) + 4 * 4
    assert [out[r].received for r in (0, 1, 3)] == [0, 0, 0]
    assert all(out[r].points == ["restore", "mid_transfer", "verify"] for r in (0, 1, 3))
    assert out[2].points == ["restore", *["mid_transfer"] * 3, "verify"]


def test_stale_and_torn_ranks_are_served_at_once_by_two_donors(make_world: Make) -> None:
    world, digest = seeded(make_world, 5, width=300)
    for rank, steps in ((0, 4), (2, 4), (4, 0)):
        world.state(rank, steps, width=300)
    plan = world.plan(0, 2, 4)
    out = world.recover({r: Orders(plan, torn=r == 2, fresh=r == 4) for r in range(5)})
    assert {o.error for o in out.values()} == {""}
    assert {o.digest for o in out.values()} == {digest}


def test_nobody_restores_and_all_align(make_world: Make) -> None:
    world, digest = seeded(make_world, 3)
    plan = world.plan()
    out = world.recover({r: Orders(plan) for r in range(3)})
    assert {(o.error, o.digest, o.received) for o in out.values()} == {("", digest, 0)}


def test_a_world_of_one(make_world: Make) -> None:
    world, digest = seeded(make_world, 1)
    out = world.recover({0: Orders(world.plan())})[0]
    assert (out.error, out.digest) == ("", digest)


@pytest.mark.parametrize(
    ("victim", "kill_at"), [(0, "mid_transfer"), (1, "mid_transfer"), (0, "restore"), (2, "mid_transfer"), (3, "restore")]
)
def test_a_death_in_the_transfer_and_the_next_attempt(make_world: Make, victim: int, kill_at: str) -> None:
    """Donors 0 and 1, a stale rank 2, a fresh rank 3."""
    world, digest = seeded(make_world, 4, width=400)
    stale = world.state(2, 4, width=400)
    world.state(3, 0, width=400)
    plan = world.plan(2, 3)
    out = world.recover({r: Orders(plan, fresh=r == 3, kill_at=kill_at if r == victim else "", seconds=3) for r in range(4)})
    assert victim not in out
    # Those who were through wait for the others in verify, and are interrupted there.
    failed = [o for o in out.values() if o.error != "Interrupted: "]
    assert failed
    assert all(o.error.startswith("CommsError: transfer of state with rank") or "the deadline passed" in o.error for o in failed)
    if victim != 2:
        assert out[2].digest == (stale if out[2] in failed else digest)
    world.replace(victim)
    world.state(victim, 0, width=400)
    restoring = {2, 3, victim}
    plan = world.plan(*restoring)
    out = world.recover({r: Orders(plan, fresh=r in {3, victim}) for r in range(4)})
    assert {(o.error, o.digest) for o in out.values()} == {("", digest)}


def test_strangers_disturb_nothing(make_world: Make) -> None:
    world, digest = seeded(make_world, 3)
    world.state(1, 0)
    plan = world.plan(1)
    hello = struct.Struct("<8sqII16s")
    greetings = [
        b"GET / HTTP/1.1\r\n\r\n" * 100,
        b"inst",
        b"",
        hello.pack(b"instep/1", plan.incarnation, 1, 0, bytes(16)) + bytes(32) + bytes(25),
        hello.pack(b"instep/1", plan.incarnation - 1, 1, 0, bytes(16)),
        hello.pack(b"instep/1", plan.incarnation + 9, 1, 0, bytes(16)),
    ]
    strangers = []
    for port in world.ports:
        for greeting in [*greetings, *[b"i"] * 150]:
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(greeting)
    try:
        out = world.recover({r: Orders(plan, fresh=r == 1) for r in range(3)})
    finally:
        for stranger in strangers:
            stranger.close()
    assert {(o.error, o.digest) for o in out.values()} == {("", digest)}


def test_a_slow_stranger_is_dropped_while_others_wait(make_world: Make) -> None:
    world, digest = seeded(make_world, 2)
    world.state(1, 0)
    plan = world.plan(1)
    with socket.create_connection(("127.0.0.1", world.ports[0])) as slow:
        slow.sendall(b"inst")
        slow.settimeout(10)
        out = world.recover({0: Orders(plan), 1: Orders(plan, fresh=True, before=2.5)})
        assert slow.recv(1) == b""
    assert {(o.error, o.digest) for o in out.values()} == {("", digest)}


def test_a_rank_with_another_secret_gets_nothing(make_world: Make) -> None:
    world, _ = seeded(make_world, 2)
    own = world.state(1, 0)
    plan = world.plan(1)
    out = world.recover({0: Orders(plan, seconds=1.5), 1: Orders(plan, fresh=True, secret=b"x" * 32, seconds=1.5)})
    assert "does not know the secret of this job" in out[1].error
    assert out[1].digest == own
    assert "the deadline passed" in out[0].error


def test_a_rank_of_another_incarnation_gets_nothing(make_world: Make) -> None:
    world, _ = seeded(make_world, 2)
    own = world.state(1, 0)
    old, new = world.plan(1), world.plan(1)
    out = world.recover({0: Orders(new, seconds=1.5), 1: Orders(old, fresh=True, seconds=1.5)})
    assert out[1].error.startswith("CommsError: transfer of state with rank 0 failed")
    assert out[1].digest == own


@pytest.mark.parametrize("at", [49, 3000, 20000])
def test_one_damaged_bit_is_found(make_world: Make, at: int) -> None:
    world, _ = seeded(make_world, 3)
    own = world.state(2, 4)
    damage = Damage(world.ports[1], at)
    try:
        plan = world.plan(2, ports={1: damage.port})
        out = world.recover({r: Orders(plan, seconds=2) for r in range(3)})
    finally:
        damage.close()
    assert "from rank 1 arrived damaged on rank 2 (digests differ)" in out[2].error
    assert out[2].digest == own


def test_a_newer_fault_ends_a_wait_at_once(make_world: Make) -> None:
    world, _ = seeded(make_world, 3)
    plan = world.plan(2)
    began = time.monotonic()
    out = world.recover({1: Orders(plan), 2: Orders(plan, fresh=True)}, interrupt_after=0.5)
    assert {o.error for o in out.values()} == {"Interrupted: "}
    assert max(o.seconds for o in out.values()) < 1.0
    assert time.monotonic() - began < 5


def test_a_donor_that_never_comes_ends_at_the_deadline(make_world: Make) -> None:
    world, _ = seeded(make_world, 2)
    plan = world.plan(1)
    out = world.recover({1: Orders(plan, fresh=True, seconds=0.5)})
    assert out[1].error == "InstepError: restore_state on rank 1: the deadline passed while waiting for rank 0"
    assert out[1].seconds < 1.5


def test_donors_that_differ_are_found(make_world: Make) -> None:
    world, _ = seeded(make_world, 3)
    world.state(1, 5, width=32)
    world.state(2, 0)
    plan = world.plan(2)
    out = world.recover({r: Orders(plan, fresh=r == 2, seconds=2) for r in range(3)})
    assert "rank 2 asked rank 1 for bytes" in out[1].error
    assert "the donors do not hold equal state" in out[1].error


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (4, r"step 7: shard group 'replica': ranks [1] differ from ranks [0, 2, 3]"),
        (2, "step 7: shard group 'replica': ranks [0] and ranks [1] differ"),
    ],
)
def test_verify_names_the_odd_rank(make_world: Make, size: int, says: str) -> None:
    world, _ = seeded(make_world, size)
    plan = world.plan()
    out = world.recover({r: Orders(plan, tamper=r == 1) for r in range(size)})
    assert all(says in o.error for o in out.values())


def test_comparing_can_be_switched_off(make_world: Make) -> None:
    world, _ = seeded(make_world, 2, compare_digests=0)
    plan = world.plan()
    out = world.recover({r: Orders(plan, tamper=r == 1) for r in range(2)})
    assert [o.verified for o in out.values()] == [[True, False]] * 2
