"""Groups of real processes are connected from the address book alone, again and again, whoever was replaced."""

import signal
import time
from collections.abc import Callable

import pytest
from gloo_world import World, group

Make = Callable[..., World]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_first_init_connects_all_ranks(make_world: Make, size: int) -> None:
    world = make_world(size)
    world.connect(group("world", *range(size)))
    assert world.together(range(size), "coalesced", name="world") == [[size * (size + 1) / 2, size]] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_survivors_stay_while_each_member_is_replaced_in_turn(make_world: Make, size: int) -> None:
    world = make_world(size)
    everyone = group("world", *range(size))
    world.connect(everyone)
    for turn in range(20):
        victim = (turn * 3) % size
        world.kill(victim)
        for rank in set(range(size)) - {victim}:
            world.ask(rank, "quiesce", incarnation=world.incarnation + 1)
        world.spawn(victim)
        world.connect(everyone)


def test_overlapping_groups_and_groups_made_later(make_world: Make) -> None:
    world = make_world(3)
    first = [group("world", 0, 1, 2), group("a", 0, 1), group("b", 0, 2), group("c", 1, 2)]
    world.connect(*first)
    later = [group("alone", 1), group("d", 2, 0)]
    for one in later:
        world.connect(one)
    for victim in (1, 0, 2):
        world.kill(victim)
        world.spawn(victim)
        world.connect(*first, *later)


def test_groups_of_another_backend_take_no_numbers(make_world: Make) -> None:
    world = make_world(2)
    other = group("other", 0, 1).model_copy(update={"backend": "nccl"})
    notes = world.ask(0, "announce", groups=[g.model_dump(mode="json") for g in (other, group("w", 0, 1), group("x", 0, 1))])
    pairs = notes["init_gloo"]["pairs"]
    assert set(pairs) == {"w", "x"}
    assert pairs["x"] == pairs["w"] + 2


def test_connecting_in_another_order_than_announced_is_an_error(make_world: Make) -> None:
    world = make_world(2)
    members, book = world.announce([group("small", 0), group("a", 0, 1), group("b", 0, 1)], ranks=[0, 1])
    for rank, own in members.items():
        world.send(rank, "connect", groups=own[::-1], book=book)
    for rank in members:
        reply = world.receive(rank)
        assert reply["error"] == "CommsError"
        assert "in the order announced" in reply["text"]


def test_a_member_that_announced_nothing_is_named(make_world: Make) -> None:
    world = make_world(2)
    world.begin_connect([group("pair", 0, 1)], ranks=[0])
    reply = world.receive(0)
    assert reply["error"] == "CommsError"
    assert "'pair' over ranks [0, 1] in incarnation 0: rank 1 announced nothing" in reply["text"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_member_that_dies_before_it_connects_fails_the_others_in_time(make_world: Make, missing: int) -> None:
    world = make_world(3, connect_timeout=1.0)
    everyone = group("world", 0, 1, 2)
    world.connect(everyone)
    members, book = world.announce([everyone], ranks=[0, 1, 2])
    world.kill(missing)
    survivors = sorted({0, 1, 2} - {missing})
    before = time.monotonic()
    for rank in survivors:
        world.send(rank, "connect", groups=members[rank], book=book)
    for reply in [world.receive(rank) for rank in survivors]:
        assert reply["error"] == "CommsError"
        assert f"incarnation {world.incarnation}" in reply["text"]
    assert time.monotonic() - before < 4.0
    world.spawn(missing)
    world.connect(everyone)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_connecting_is_interrupted_at_once_and_the_next_try_works(make_world: Make, silent: int) -> None:
    world = make_world(3, connect_timeout=5.0)
    everyone = group("world", 0, 1, 2)
    world.connect(everyone)
    members, book = world.announce([everyone], ranks=[0, 1, 2])
    world.signal(silent, signal.SIGSTOP)
    survivors = sorted({0, 1, 2} - {silent})
    for rank in survivors:
        world.send(rank, "connect", groups=members[rank], book=book)
    time.sleep(0.2)
    before = time.monotonic()
    for rank in survivors:
        world.send(rank, "interrupt")
        assert world.receive(rank)["error"] == "Interrupted"
    assert time.monotonic() - before < 0.2
    for rank in survivors:
        world.ask(rank, "quiesce", incarnation=world.incarnation + 1)
    world.kill(silent)
    world.spawn(silent)
    assert world.connect(everyone) < 2.0


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8, 16])
def test_a_member_killed_while_all_connect(make_world: Make, milliseconds: int) -> None:
    world = make_world(4, connect_timeout=1.0)
    groups = [group("world", 0, 1, 2, 3), group("pair", 1, 2)]
    world.connect(*groups)
    for victim in (1, 2):
        world.begin_connect(groups)
        time.sleep(milliseconds / 1000)
        world.kill(victim)
        for rank in sorted({0, 1, 2, 3} - {victim}):
            reply = world.receive(rank)
            assert "value" in reply or reply["error"] == "CommsError", reply
            world.ask(rank, "quiesce", incarnation=world.incarnation + 1)
        world.spawn(victim)
        world.connect(*groups)
