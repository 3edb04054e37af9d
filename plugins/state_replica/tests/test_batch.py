import os
import threading

import pytest

from instep_state_replica.batch import batch


def test_a_thread_is_a_batch_for_as_long_as_it_says() -> None:
    def fail() -> None:
        with batch():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_of_ones_own_choice_is_kept() -> None:
    seen: list[int] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch():
            seen.append(os.sched_getscheduler(0))
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_where_it_is_forbidden_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, policy: int, param: os.sched_param) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with batch():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
