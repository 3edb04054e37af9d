"""The signal that interrupts: it raises in the script's own code, and nowhere in what instep does on its behalf."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.utils.data import DataLoader, Dataset

from instep.board import Board
from instep.errors import InstepError, Interrupted
from instep.model import Fault
from instep.torch import loaders
from instep.torch.unwind import Unwinder, guarded

FAULT = Fault(kind="exit", ranks=(1,), detail="gone", detected_by="agent", at=0.0)


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def unwinder(board: Board) -> Iterator[Unwinder]:
    made = Unwinder(board)
    board.interrupt(1, FAULT)
    yield made
    made.close()


@contextmanager
def signals(unwinder: Unwinder) -> Iterator[None]:
    """A signal to the main thread every two milliseconds."""
    stop, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def send() -> None:
        while not stop.wait(0.002):
            signal.pthread_kill(main, unwinder._signal)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def interrupted(unwinder: Unwinder, call: Callable[[], object]) -> bool:
    with signals(unwinder):
        try:
            guarded(call)
        except Interrupted:
            return True
    return False


def test_the_script_s_own_code_is_interrupted(unwinder: Unwinder) -> None:
    assert interrupted(unwinder, lambda: time.sleep(5))
    assert interrupted(unwinder, lambda: threading.Event().wait(5))


def test_code_outside_the_block_is_not(unwinder: Unwinder) -> None:
    with signals(unwinder):
        time.sleep(0.05)


def test_library_sections_and_commit_bodies_are_not(unwinder: Unwinder) -> None:
    def section() -> None:
        with unwinder.library():
            time.sleep(0.05)
        sections.append("left")
        time.sleep(5)

    sections: list[str] = []
    unwinder.mask()
    assert not interrupted(unwinder, lambda: time.sleep(0.05))
    unwinder.unmask()
    assert interrupted(unwinder, section)
    assert sections == ["left"]
    unwinder.reset()


def test_a_rank_that_has_acknowledged_is_left_alone(unwinder: Unwinder, board: Board) -> None:
    board.acknowledge(1)
    assert not interrupted(unwinder, lambda: time.sleep(0.05))
    board.interrupt(2, FAULT)
    assert interrupted(unwinder, lambda: time.sleep(5))
    board.current = 2
    assert not interrupted(unwinder, lambda: time.sleep(0.05))


def test_what_instep_waits_in_is_never_cut(unwinder: Unwinder, board: Board) -> None:
    """A lock that was taken and never given back would stop the control thread."""

    def waits() -> None:
        with pytest.raises(InstepError, match="waited"):
            board.wait(lambda b: False, what="nothing", seconds=0.4)

    assert not interrupted(unwinder, waits)
    assert board.changed.acquire(timeout=1)
    board.changed.release()


def test_datasets_of_adopted_loaders_are_the_script_s_own_code(unwinder: Unwinder) -> None:
    class Slow(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(5)
            return index

    loader = DataLoader(Slow())
    cursor = loaders.adopt("loader", loader, on_delivery=lambda: None)
    assert cursor is not None
    assert interrupted(unwinder, lambda: next(iter(loader)))
    cursor.release()


def test_a_late_signal_does_not_end_the_process(unwinder: Unwinder) -> None:
    unwinder.close()
    signal.raise_signal(unwinder._signal)


def test_patience_is_a_median_step_within_limits(board: Board) -> None:
    unwinder = Unwinder(board)
    assert 0.1 < unwinder.patience() < 2
    for _ in range(5):
        unwinder.stepped()
        time.sleep(0.05)
    assert 0.04 < unwinder.patience() < 0.5
    unwinder.close()
