"""The board: incarnations only move forward, and whoever waits on it is woken or cut."""

import threading
import time

import pytest

from instep.board import Board, deliver
from instep.errors import InstepError, Interrupted
from instep.messages import Closing, Gathered, Planned, Release
from instep.model import AddressBook, Fault, Plan

FAULT = Fault(kind="exit", ranks=(1,), detail="gone", detected_by="agent", at=0.0)


def plan(incarnation: int) -> Plan:
    return Plan(incarnation=incarnation, block=0, step=3, roles=(), donors={}, book=AddressBook(incarnation=incarnation, addresses=()))


def test_only_newer_incarnations_are_news() -> None:
    board = Board()
    assert not board.revoked
    assert board.interrupt(2, FAULT)
    assert not board.interrupt(2, FAULT)
    assert not board.interrupt(1, FAULT)
    assert board.revoked
    with pytest.raises(Interrupted, match="2 was opened"):
        board.check()
    check = board.checker(2)
    check()
    board.interrupt(3, FAULT)
    with pytest.raises(Interrupted):
        check()


def test_a_plan_of_another_incarnation_is_dropped_and_not_adopted() -> None:
    board = Board()
    board.interrupt(2, FAULT)
    deliver(board, Planned(plan=plan(1)))
    assert board.plan is None
    deliver(board, Planned(plan=plan(2)))
    assert board.plan is not None
    board.interrupt(3, FAULT)
    assert not board.adopt(plan(2))
    assert board.current == 0
    assert board.revoked
    assert board.adopt(plan(3))
    assert not board.revoked


def test_an_acknowledgement_waits_for_the_round_of_quiesce_that_is_under_way() -> None:
    board, order = Board(), []
    inside = threading.Event()

    def round_of_quiesce() -> None:
        with board.quieting:
            inside.set()
            time.sleep(0.05)
            order.append("quiet")

    thread = threading.Thread(target=round_of_quiesce)
    thread.start()
    inside.wait(5)
    board.acknowledge(1)
    order.append("acknowledged")
    thread.join()
    assert order == ["quiet", "acknowledged"]
    board.acknowledge(0)
    assert board.acknowledged == 1


def test_answers_of_the_agent_are_kept_by_key_and_block() -> None:
    board = Board()
    deliver(board, Gathered(incarnation=0, key="0/a", notes=()))
    deliver(board, Gathered(incarnation=1, key="1/a", notes=({"n": {}},)))
    deliver(board, Closing(block=0))
    deliver(board, Release(block=0))
    assert len(board.gathered["1/a"].notes) == 1
    assert 0 in board.released
    assert 1 not in board.closing
    with pytest.raises(InstepError, match="different versions"):
        deliver(board, Hello())  # type: ignore[arg-type]


class Hello:
    t = "hello"


def test_waits_end_by_news_by_check_and_by_deadline() -> None:
    board = Board()
    threading.Timer(0.05, lambda: board.interrupt(1, FAULT)).start()
    begin = time.monotonic()
    board.wait(lambda b: b.target == 1, what="news", seconds=5)
    assert time.monotonic() - begin < 2
    with pytest.raises(Interrupted):
        board.wait(lambda b: False, what="never", check=board.check)
    with pytest.raises(InstepError, match=r"0\.05 s for never"):
        board.wait(lambda b: False, what="never", seconds=0.05)
    assert board.noticed_within(0)


def test_release_counts_more_than_an_interruption_that_came_with_it() -> None:
    """A rank that was released has left its block: it must not run it again because of a fault in the next one."""
    board = Board()
    deliver(board, Release(block=0))
    board.interrupt(1, FAULT)
    board.wait(lambda b: 0 in b.released, what="the release", check=board.check)
