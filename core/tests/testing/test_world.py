"""Worlds of real processes: commands, gathers, deadlines, deaths, and nothing left over."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from instep.errors import InstepError
from instep.testing import World
from instep.testing.nursery import Nursery


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def world(instep_nurseries: Callable[[Sequence[str]], Nursery]) -> Iterator[World]:
    with World(instep_nurseries(()), 3) as world:
        yield world


def test_each_rank_knows_who_it_is(world: World) -> None:
    assert {rank: a.value for rank, a in world.together([0, 1, 2], "broken_plugins:whoami").items()} == {r: [r, 3, 0] for r in range(3)}


def test_a_gather_reaches_all(world: World) -> None:
    assert [a.value for a in world.together([0, 1, 2], "broken_plugins:shout").values()] == [["rank 0", "rank 1", "rank 2"]] * 3


def test_an_error_names_type_text_and_place(world: World) -> None:
    answer = world.do(1, "broken_plugins:fail")
    assert (answer.ok, answer.error, answer.text) == (False, "ValueError", "rank 1 fails")
    assert "broken_plugins.py:" in answer.where
    assert "in fail" in answer.where
    assert world.do(1, "broken_plugins:whoami").ok


def test_a_command_past_its_deadline_is_told_with_its_place_and_ended(world: World) -> None:
    answer = world.do(2, "broken_plugins:stand", seconds=0.5)
    assert "broken_plugins.py:" in answer.blocked
    assert "in stand" in answer.blocked
    assert world.living == [0, 1]
    with pytest.raises(InstepError, match=r"replace\(2\)"):
        world.do(2, "broken_plugins:whoami")
    world.replace(2)
    assert world.do(2, "broken_plugins:whoami").value == [2, 3, 1]


def test_a_command_that_computes_for_ever_is_ended_too(world: World) -> None:
    """It gets more time than one that sleeps, since it may lack a processor only; but not for ever."""
    assert "in spin" in world.do(1, "broken_plugins:spin", seconds=0.3).blocked


def test_a_newer_incarnation_ends_waits_and_gathers(world: World) -> None:
    answers = world.together([0, 1], "broken_plugins:wait", meanwhile=lambda: world.interrupt(0, 1))
    assert [a.error for a in answers.values()] == ["Interrupted", "Interrupted"]


def test_a_dead_rank_is_told(world: World) -> None:
    answers = world.together([0], "broken_plugins:wait", meanwhile=lambda: os.kill(world._peers[0].pid, 9))
    assert answers[0].died
    assert str(answers[0]) == "ended its process"


def test_nothing_outlives_the_world(instep_nurseries: Callable[[Sequence[str]], Nursery]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with World(instep_nurseries(()), 2) as world:
        pids = [peer.pid for peer in world._peers.values()]
        world.stop(0)
    assert [pid for pid in pids if alive(pid)] == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_only_own_files_in_shared_memory_count(world: World) -> None:
    path = f"/dev/shm/a-test-{os.getpid()}"
    assert world.do(0, "broken_plugins:map_shared_memory", path=path).value == [[path], [], False]


def test_a_gloo_world_computes(gloo_world: Callable[..., World]) -> None:
    world = gloo_world(3)
    answers = world.together([0, 1, 2], "instep.testing.gloo:total", each=lambda rank: {"value": rank + 1.0})
    assert [a.value for a in answers.values()] == [6.0, 6.0, 6.0]


def test_an_incident_for_tests_of_reports(incident: Callable[..., object]) -> None:
    assert getattr(incident(step=9), "step") == 9  # noqa: B009 - its type is the kit's business
