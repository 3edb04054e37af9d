"""Aborting in one group call with a deadline, and what holds on to a communicator that is gone."""

import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from instep.errors import CommsError, UsageError
from instep_init_nccl.backend import Aborting, revoke
from instep_init_nccl.captured import Captured


class Backend:
    """As much of a ProcessGroupNCCL as an abort and a capture touch."""

    calls: ClassVar[list[str]] = []

    def __init__(self, name: str, abort: Callable[[], None] = lambda: None) -> None:
        self.name, self._abort, self.issued = name, abort, 0

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append(self.name)
        self._abort()

    def _comm_ptr(self) -> int:
        raise RuntimeError("no communicator yet")

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def register_mem_pool(self, pool: object) -> str:
        self.calls.append(f"pool of {self.name}")
        return "registered"


class Graph:
    """As much of a CUDAGraph as a capture touches."""

    def capture_begin(self, *, pool: object = None) -> object:
        return pool

    def capture_end(self) -> None:
        """Nothing."""

    def replay(self) -> str:
        return "replayed"


class Communicator:
    """As much of a communicator as an abort touches."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.label, self.aborted = backend, backend.name, threading.Event()


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Backend.calls = []


def made(*backends: Backend) -> Any:
    return [Communicator(backend) for backend in backends]


def test_all_communicators_are_aborted_in_one_group_call() -> None:
    communicators = made(Backend("a"), Backend("b"), Backend("c"))
    Aborting(communicators, revoking=False).wait(20.0, rank=0)
    assert Backend.calls == ["start", "a", "b", "c", "end"]
    assert all(one.aborted.is_set() for one in communicators)


def test_an_abort_that_hangs_is_left_behind_with_a_clear_error() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    communicators = made(Backend("a"), Backend("b", hang))
    aborting = Aborting(communicators, revoking=False)
    with pytest.raises(CommsError, match=r"rank 3: aborting a, b has not ended after 0.1 s: NCCL or the driver hangs"):
        aborting.wait(0.1, rank=3)
    assert not any(one.aborted.is_set() for one in communicators)
    release.set()
    aborting.wait(20.0, rank=3)
    assert all(one.aborted.is_set() for one in communicators)


def test_an_abort_that_fails_ends_the_group_call_and_is_told() -> None:
    def fail() -> None:
        raise RuntimeError("unhandled cuda error")

    aborting = Aborting(made(Backend("a", fail), Backend("b")), revoking=False)
    with pytest.raises(CommsError, match="rank 1: aborting a, b: unhandled cuda error"):
        aborting.wait(20.0, rank=1)
    assert Backend.calls == ["start", "a", "end"]


def test_where_nothing_can_be_revoked_nothing_is() -> None:
    assert revoke(made(Backend("a"))) == 0


# ---- what captured a communicator


def capture(graph: Graph, backend: Backend | None = None) -> Graph:
    assert graph.capture_begin(pool=7) == 7
    if backend is not None:
        backend.issued += 1
    graph.capture_end()
    return graph


def test_a_graph_with_collectives_is_refused_once_its_communicators_are_gone() -> None:
    stock = Graph.replay
    watching = Captured(Graph, Backend)
    backend = Backend("world")
    watching.swapped(0, [backend])
    with_collective, without = capture(Graph(), backend), capture(Graph())
    assert with_collective.replay() == without.replay() == "replayed"
    second = Backend("world")
    watching.swapped(1, [second])
    assert without.replay() == "replayed"
    with pytest.raises(UsageError, match=r"captured NCCL collectives in incarnation 0, .* gone \(now 1\): capture it inside the block"):
        with_collective.replay()
    again = capture(with_collective, second)
    assert again.replay() == "replayed"
    watching.close()
    assert Graph.replay is stock


def test_pools_of_communicators_that_are_gone_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watching = Captured(Graph, Backend)
    backend = Backend("world")
    watching.swapped(0, [backend])
    assert backend.register_mem_pool(object()) == "registered"
    with caplog.at_level(logging.WARNING):
        watching.swapped(1, [Backend("world")])
        watching.swapped(2, [Backend("world")])
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "until they are registered again; do that inside the block" in told[0]
    watching.close()
    backend.register_mem_pool(object())
    assert Backend.calls == ["pool of world", "pool of world"]
