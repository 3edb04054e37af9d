"""What the agent reads of processes in /proc, and when it bothers to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from instep.agent.procfs import children, exit_code, threads, vitals
from instep.agent.records import Header, State
from instep.agent.workers import Memory

from .jobs import until


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    until(lambda: vitals(process.pid).cpu > 0 or vitals(process.pid).io > 0)
    yield process.pid
    process.kill()
    process.wait()


def test_a_busy_process_uses_cpu_and_a_sleeping_one_does_not(sleeper: int) -> None:
    until(lambda: _still(sleeper), what="the interpreter to have started")
    mine = vitals(os.getpid()).cpu
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert vitals(os.getpid()).cpu > mine


def _still(pid: int) -> bool:
    before = vitals(pid)
    time.sleep(0.15)
    return vitals(pid) == before


def test_a_childs_work_is_movement_of_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert child.pid in children(os.getpid())
        before = vitals(os.getpid()).cpu
        until(lambda: vitals(os.getpid()).cpu - before > 10)
    finally:
        child.kill()
        child.wait()


def test_a_busy_thread_is_movement_and_one_that_beats_now_and_then_is_not() -> None:
    script = "import threading, time\ndef work():\n while True: {}\nthreading.Thread(target=work, daemon=True).start()\ntime.sleep(60)"
    for body, moves in (("pass", True), ("sum(range(60000)); time.sleep(0.02)", False)):
        process = subprocess.Popen([sys.executable, "-c", script.format(body)])
        try:
            until(lambda pid=process.pid: len(threads(pid)) == 2)  # type: ignore[misc]
            time.sleep(0.2)
            before = vitals(process.pid).cpu
            time.sleep(0.8)
            assert (vitals(process.pid).cpu > before) == moves
        finally:
            process.kill()
            process.wait()


def test_a_stopped_process_is_seen_as_stopped(sleeper: int) -> None:
    os.kill(sleeper, signal.SIGSTOP)
    until(lambda: vitals(sleeper).stopped)
    os.kill(sleeper, signal.SIGCONT)
    until(lambda: not vitals(sleeper).stopped)


def test_vitals_of_a_process_that_moves_are_not_read_and_never_those_of_its_predecessor(sleeper: int) -> None:
    memory = Memory(0)
    header = Header(memory.record)
    try:
        os.kill(sleeper, signal.SIGSTOP)
        until(lambda: memory.vitals(sleeper, memory.progress()).stopped)
        header.put("step", 1)
        assert not memory.vitals(sleeper, memory.progress()).stopped, "its words move, so it cannot be stopped"
        assert memory.vitals(sleeper, memory.progress()).stopped
    finally:
        header.close()
        memory.close()


def test_a_new_birth_keeps_what_was_committed_and_stands_nowhere() -> None:
    memory = Memory(0)
    header = Header(memory.record)
    assert memory.progress().joined == -1
    header.put("step", 7)
    header.put("state", State.COMMIT)
    header.put("waiting", 1)
    header.operation("world barrier")
    memory.new_birth()
    progress = memory.progress()
    assert (progress.step, progress.state, progress.waiting, progress.operation) == (7, State.BORN, 0, "")
    header.close()
    memory.close()


@pytest.mark.parametrize(("code", "expected"), [("import os; os._exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_end_of_a_process_that_nobody_reaped_can_be_read(code: str, expected: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: exit_code(child.pid) is not None)
    assert exit_code(child.pid) == expected
    child.wait()
    assert exit_code(child.pid) is None


def test_threads_are_named() -> None:
    assert threads(os.getpid())
