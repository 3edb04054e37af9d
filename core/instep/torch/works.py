"""Works that can be failed: gloo cannot abort, and loses wake-ups, so nobody ever waits on it without looking up.

A wait polls the inner work in slices and looks at the board; a future is a proxy that quiesce can fail. See the lost wake-up in
gloo's ``Pair::signalException`` (it signals ``op.buf`` only, collectives use ``op.ubuf``).
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.autograd.variable import Variable
from torch.futures import Future

from instep.errors import CommsError
from instep.torch import frames
from instep.torch.ops import Op

if TYPE_CHECKING:
    from instep.torch.gate import Gate

_SLICE = timedelta(milliseconds=50)
_PATIENCE = timedelta(minutes=30)
"""Without a timeout of its own, gloo's point-to-point waits as long as connecting may take. The watchdog finds hangs."""
Observer = Callable[[str, int, Sequence[Tensor]], None]


def finished(outputs: Sequence[Tensor]) -> Work:
    """A work that is done already, for loopback."""
    future: Future[list[Tensor]] = Future()
    future.set_result(list(outputs))
    work: Work = _create_work_from_future(future)
    return work


class Arrived(Work):
    """A receive from anybody that is done already, in loopback: ``source`` is the one tensor of a rank that the tape fills."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def _source_rank(self) -> int:
        return int(self._source.item())


class FailableWork(Work):
    """A stock work inside, with a wait that ends on a fault and a future that quiesce can fail."""

    _observers: "tuple[Observer, ...]"
    _proxy: "Future[object] | None" = None
    _base: "Future[None] | None" = None
    _error: Exception | None = None
    _settled = False
    _waiter: "_Waiter | None" = None

    def __init__(
        self, gate: "Gate", inner: Work, op: Op, outputs: list[Tensor], *, observer: Observer | None, label: str, sequence: int
    ) -> None:
        super().__init__()
        self._gate, self._inner, self._op, self._outputs = gate, inner, op, outputs
        self._observers = () if observer is None else (observer,)
        self.label, self.sequence, self.incarnation = label, sequence, gate.board.current

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation. Raises ``Interrupted`` on a fault elsewhere, ``CommsError`` when the connection failed."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout > timedelta(0) else None
        if self.poll():
            return True
        with self._gate.waiting(self.label, self.sequence):
            while not self.poll():
                self._gate.check()
                if self.incarnation < self._gate.board.current:
                    raise self._lost()
                if deadline is not None and time.monotonic() > deadline:
                    raise CommsError(f"{self.label}: not complete after {timeout.total_seconds()} s")
        return True

    def poll(self) -> bool:
        """Wait one slice; true when the operation is complete. Raises like ``wait`` when it failed."""
        try:
            if not (self._wait_slice() if self._op.sliced else self._wait_aside()):
                return False
        except RuntimeError as error:
            if self.incarnation < self._gate.board.current:
                raise self._lost() from error
            self._gate.failed(self.label, error)
        self._observe()
        return True

    def ended(self) -> bool:
        """Whether the inner operation has stopped touching its tensors."""
        if not self._op.sliced:
            return self._waiter is None or self._waiter.done.is_set()
        return bool(self._inner.is_completed())

    def is_completed(self) -> bool:
        """Whether the operation is complete."""
        return bool(self._inner.is_completed()) if self._op.sliced else self._waiter is not None and self._waiter.done.is_set()

    def is_success(self) -> bool:
        """Whether the operation completed without an error."""
        return bool(self._inner.is_success())

    def result(self) -> list[Tensor]:
        """The tensors that the operation wrote."""
        return self._outputs

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def get_future(self) -> "Future[object]":
        """A future of the outputs that fails at once when a fault is known.

        DDP's reducer gets the inner one: it waits for it at the end of the backward pass, behind a wait of this work there. So nobody
        waits in C++ for what gloo may have lost, and gloo's thread completes it without Python.
        """
        if self._op.sliced and frames.engine():
            inner: Future[object] = self._inner.get_future()
            Variable._execution_engine.queue_callback(self.wait)  # type: ignore[arg-type]
            return inner
        if self._proxy is None:
            inner = self._inner.get_future()
            base: Future[None] = Future()
            self._base, self._proxy = base, base.then(self._value)
            self._gate.proxies.add(self)
            inner.add_done_callback(self._complete)
        return self._proxy

    def fail(self, error: Exception) -> bool:
        """Complete the proxy future with ``error``; false when it was complete already."""
        return self._settle(error)

    def _complete(self, future: "Future[object]") -> None:
        try:
            future.wait()
        except RuntimeError as error:
            if self.incarnation == self._gate.board.current:
                self._gate.broken = True
            self._settle(CommsError(f"{self.label}: {error}"))
        else:
            self._observe()
            self._settle(None)

    def _settle(self, error: Exception | None) -> bool:
        with self._gate.settling:
            if self._settled or self._base is None:
                return False
            self._settled, self._error = True, error
        self._gate.proxies.discard(self)
        self._base.set_result(None)
        return True

    def _value(self, _: "Future[None]") -> object:
        # Raising here is the only way to hand C++ an error: set_exception() looks like a value to it.
        if self._error is not None:
            raise self._error
        return self._outputs

    def follow(self, observer: Observer) -> None:
        """Call one more observer once the operation has succeeded and somebody has seen that."""
        with self._gate.settling:
            self._observers += (observer,)

    def _observe(self) -> None:
        if not self._observers:
            return
        with self._gate.settling:
            observers, self._observers = self._observers, ()
        for observer in observers:
            observer(self.label, self.sequence, self._outputs)

    def _lost(self) -> CommsError:
        return CommsError(f"{self.label} was issued before a recovery and is lost: issue it inside the block, which runs again")

    def _wait_slice(self) -> bool:
        try:
            self._inner.wait(_SLICE)
        except RuntimeError:
            if not self._inner.is_completed():
                return False
            self._inner.wait(_SLICE)  # it may have ended since that time-out: now it raises its own error, or none
        return True

    def _wait_aside(self) -> bool:
        if self._waiter is None:
            self._waiter = _Waiter(self._inner)
        return self._waiter.wait(_SLICE.total_seconds())


class _Waiter:
    """Waits for one work that must not be polled, in a thread that may be left behind."""

    def __init__(self, inner: Work) -> None:
        self.done = threading.Event()
        self._inner = inner
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="instep-wait", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the work ended within ``seconds``; raises what it raised."""
        if not self.done.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._inner.wait(_PATIENCE)
        except RuntimeError as error:
            self._error = error
        finally:
            self.done.set()
