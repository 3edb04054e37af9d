"""Operations that wait for a silent or dead peer are failed from outside, and nothing newer is touched."""

import signal
import time
from collections.abc import Callable

import pytest
from gloo_world import World, group

Make = Callable[..., World]


@pytest.mark.parametrize("count", [8, 262144])
def test_quiesce_fails_operations_that_wait_for_a_stopped_peer(make_world: Make, count: int) -> None:
    world = make_world(4)
    everyone = group("world", 0, 1, 2, 3)
    world.connect(everyone)
    world.signal(2, signal.SIGSTOP)
    for rank in (0, 1, 3):
        world.ask(rank, "get_stuck", name="world", count=count)
    assert [world.ask(rank, "outcome", seconds=0.2) for rank in (0, 1, 3)] == ["stuck"] * 3
    before = time.monotonic()
    for rank in (0, 1, 3):
        world.ask(rank, "quiesce", incarnation=1)
    outcomes = [world.ask(rank, "outcome", seconds=2.0) for rank in (0, 1, 3)]
    if count == 8:
        assert outcomes == ["RuntimeError"] * 3
        assert time.monotonic() - before < 1.0
    else:
        assert outcomes.count("RuntimeError") >= 1  # gloo may lose the wake-up of a large send
    world.kill(2)
    world.spawn(2)
    world.connect(everyone)


def test_quiesce_of_an_incarnation_already_connected_does_nothing(make_world: Make) -> None:
    world = make_world(2)
    world.connect(group("world", 0, 1))
    for _ in range(3):
        assert world.together([0, 1], "quiesce", incarnation=world.incarnation) == [None, None]
    assert world.together([0, 1], "allreduce", name="world") == [3.0, 3.0]


def test_quiesce_before_start_and_twice_is_safe(make_world: Make) -> None:
    world = make_world(2)
    for _ in range(2):
        world.together([0, 1], "quiesce", incarnation=5)
    world.connect(group("world", 0, 1))
    for _ in range(3):
        world.together([0, 1], "quiesce", incarnation=world.incarnation + 1)
    world.send(0, "allreduce", name="world")
    assert world.receive(0)["error"] == "RuntimeError"
    world.connect(group("world", 0, 1))


def test_nothing_leaks_over_a_hundred_incarnations(make_world: Make) -> None:
    world = make_world(3)
    groups = [group("world", 0, 1, 2), group("a", 0, 1), group("b", 1, 2)]

    def turn() -> None:
        for rank in range(3):
            world.ask(rank, "quiesce", incarnation=world.incarnation + 1)
        world.together(range(3), "drop")
        world.connect(*groups)

    for _ in range(5):
        turn()
    before = [world.ask(rank, "census") for rank in range(3)]
    for _ in range(100):
        turn()
    after = [world.ask(rank, "census") for rank in range(3)]
    for rank in range(3):
        assert after[rank]["fds"] <= before[rank]["fds"] + 2
        assert after[rank]["threads"] <= before[rank]["threads"] + 1


def test_only_the_gloo_device_listens(make_world: Make) -> None:
    world = make_world(2)
    world.connect(group("world", 0, 1))
    for rank in range(2):
        assert world.ask(rank, "census")["listening"] == [world.addresses[rank]["ports"]["gloo"]]
