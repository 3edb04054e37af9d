"""The barrier of a machine: nobody passes before all have arrived, a cut leaves nothing behind that counts later."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from instep.agent import barrier
from instep.agent.barrier import BarrierFds, NodeBarrier

PATIENCE = 20.0


@pytest.fixture
def shared() -> Iterator[BarrierFds]:
    fds = barrier.create(8)
    yield fds
    for fd in fds:
        os.close(fd)


def ranks(shared: BarrierFds, size: int) -> list[NodeBarrier]:
    return [NodeBarrier(shared, rank=rank, size=size) for rank in range(size)]


def passed(one: NodeBarrier) -> bool:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if one.wait(0.005):
            return True
    return False


def test_nobody_passes_before_the_last_one_has_arrived(shared: BarrierFds) -> None:
    everyone = ranks(shared, 3)
    for number in range(5):
        for one in everyone[:-1]:
            one.arrive(0, number)
        assert not any(one.wait(0.0) for one in everyone[:-1])
        everyone[-1].arrive(0, number)
        assert all(one.wait(0.0) and one.agreed() for one in everyone)


def test_the_last_one_wakes_all_others(shared: BarrierFds) -> None:
    everyone = ranks(shared, 4)
    for one in everyone[:-1]:
        one.arrive(0, 1)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda one=one: woken.append(one.wait(PATIENCE))) for one in everyone[:-1]]
    for thread in threads:
        thread.start()
    before = time.monotonic()
    everyone[-1].arrive(0, 1)
    for thread in threads:
        thread.join()
    assert woken == [True] * 3
    assert time.monotonic() - before < PATIENCE / 2


def test_different_codes_are_seen_by_all(shared: BarrierFds) -> None:
    everyone = ranks(shared, 3)
    for rank, one in enumerate(everyone):
        one.arrive(4, 6 + (rank == 1))
    assert all(one.wait(0.0) for one in everyone)
    assert not any(one.agreed() for one in everyone)


def test_what_a_cut_barrier_left_counts_for_no_later_incarnation(shared: BarrierFds) -> None:
    """Rank 2 dies after it arrived; the others were cut at different barriers; its successor starts from nothing."""
    everyone = ranks(shared, 3)
    for one in everyone:
        one.arrive(0, 1)
    assert all(one.wait(0.0) for one in everyone)
    everyone[2].arrive(0, 2)
    everyone[0].arrive(0, 2)
    everyone[2] = NodeBarrier(shared, rank=2, size=3)
    for number in range(4):
        for one in everyone[:2]:
            one.arrive(1, number)
        assert not any(one.wait(0.0) for one in everyone[:2])
        everyone[2].arrive(1, number)
        assert all(one.wait(0.0) and one.agreed() for one in everyone)


def test_a_rank_that_is_one_barrier_ahead_takes_nobody_along(shared: BarrierFds) -> None:
    first, second = ranks(shared, 2)
    first.arrive(0, 1)
    second.arrive(0, 1)
    assert first.wait(0.0)
    first.arrive(0, 2)
    assert second.wait(0.0)
    assert second.agreed()
    assert not first.wait(0.0)


def test_a_rank_sees_whether_all_others_have_gone_on(shared: BarrierFds) -> None:
    everyone = ranks(shared, 3)
    assert everyone[0].behind(0, 0.0)
    for number in range(3):
        for one in everyone:
            one.arrive(0, number)
        for one in everyone[:-1]:
            one.passed()
        assert not everyone[0].behind(0, 0.002)
        assert everyone[0].behind(1, 0.0)
        everyone[-1].passed()
        assert everyone[0].behind(0, 0.0)


def test_processes_meet_thousands_of_times_in_step(shared: BarrierFds) -> None:
    """The code tells the round, so a rank that passed too early would not agree."""
    size, rounds = 4, 2000
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _meet(shared, rank, size, rounds)
            finally:
                os._exit(code)
        children.append(pid)
    until = time.monotonic() + 2 * PATIENCE
    codes: dict[int, int] = {}
    while len(codes) < size and time.monotonic() < until:
        for pid in set(children) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in set(children) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert list(codes.values()) == [0] * size


def _meet(shared: BarrierFds, rank: int, size: int, rounds: int) -> int:
    one, draw = NodeBarrier(shared, rank=rank, size=size), random.Random(rank)
    for number in range(rounds):
        if draw.random() < 0.01:
            time.sleep(0.001 * draw.random())
        one.arrive(3, number % barrier.CODES)
        if not passed(one) or not one.agreed():
            return 2
        one.passed()
        if not one.behind(3, PATIENCE):
            return 3
    return 0
