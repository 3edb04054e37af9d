"""A work of a communicator, for tests: it ends when it is told to, well or badly, or never; and the gate that such works pass."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Work

from instep.agent import records
from instep.agent.records import Header
from instep.board import Board
from instep.torch.gate import Gate
from instep.torch.tape import Tape


class Told(Work):
    """As gloo's: a wait may time out."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self.late = False

    def end(self, error: str | None = None) -> None:
        self._error = None if error is None else RuntimeError(error)
        self._ended.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._ended.wait(timeout.total_seconds() or None):
            if self.late:  # the operation ends between the time-out and the question whether it has
                self.end()
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


@contextmanager
def gate_of_one() -> Iterator[Gate]:
    header, setup = records.create("test-header"), os.memfd_create("test-setup")
    yield Gate(Board(), Header(header), Tape(setup), loopback=False)
    os.close(header)
    os.close(setup)
