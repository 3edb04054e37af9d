"""Works and futures of handles: slices, failures, futures that fail, graves; with inner works that behave as gloo's do."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from session_world import PROLOGUE, play
from told_work import Told, gate_of_one
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.futures import Future

from instep.agent.events import Died
from instep.agent.spawner import Server
from instep.errors import CommsError, Interrupted
from instep.model import Fault, Group
from instep.torch import gate as gate_module
from instep.torch.gate import Gate
from instep.torch.graveyard import Graveyard
from instep.torch.handle import Handle
from instep.torch.ops import OPS
from instep.torch.works import FailableWork

FAULT = Fault(kind="exit", ranks=(1,), detail="gone", detected_by="agent", at=0.0)


class Inner(Told):
    """With a future, or without any."""

    def __init__(self, *, future: bool = True) -> None:
        super().__init__()
        self._future: Future[list[torch.Tensor]] | None = Future() if future else None

    def end(self, error: str | None = None) -> None:
        super().end(error)
        if self._future is not None:
            self._future.set_result([])

    def get_future(self) -> "Future[list[torch.Tensor]]":
        if self._future is None:
            raise RuntimeError("ProcessGroup's getFuture not implemented")

        def value(_: "Future[list[torch.Tensor]]") -> list[torch.Tensor]:
            if self._error is not None:
                raise self._error
            return []

        return self._future.then(value)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(gate_module, "_NOTICE", 0.3)
    with gate_of_one() as made:
        yield made


def work(gate: Gate, inner: Inner, op: str = "allreduce") -> FailableWork:
    return FailableWork(gate, inner, OPS[op], [torch.ones(1)], observer=None, label=f"0 {op}", sequence=1)


def later(seconds: float, call: Callable[[], object]) -> None:
    threading.Timer(seconds, call).start()


@pytest.mark.parametrize("op", ["allreduce", "recv"])
def test_a_wait_ends_with_the_operation(gate: Gate, op: str) -> None:
    inner = Inner()
    later(0.12, inner.end)
    assert work(gate, inner, op).wait()
    assert gate.header.get("waiting") == 0


@pytest.mark.parametrize("op", ["allreduce", "recv"])
def test_a_wait_ends_with_a_fault_elsewhere(gate: Gate, op: str) -> None:
    begin = time.monotonic()
    later(0.1, lambda: gate.board.interrupt(1, FAULT))
    inner = Inner()
    with pytest.raises(Interrupted):
        work(gate, inner, op).wait()
    assert time.monotonic() - begin < 1
    inner.end()


@pytest.mark.parametrize("op", ["allreduce", "recv"])
def test_a_broken_connection_waits_for_the_notice_of_its_cause(gate: Gate, op: str) -> None:
    inner = Inner()
    later(0.05, lambda: inner.end("Connection closed by peer"))
    later(0.15, lambda: gate.board.interrupt(1, FAULT))
    with pytest.raises(Interrupted):
        work(gate, inner, op).wait()
    assert gate.broken


@pytest.mark.parametrize("op", ["allreduce", "recv"])
def test_a_broken_connection_without_a_cause_is_an_error(gate: Gate, op: str) -> None:
    inner = Inner()
    inner.end("Connection closed by peer")
    with pytest.raises(CommsError, match=f"0 {op}: Connection closed"):
        work(gate, inner, op).wait()


def test_an_operation_that_ends_right_after_a_slice_has_not_failed(gate: Gate) -> None:
    inner = Inner()
    inner.late = True
    assert work(gate, inner).wait()
    assert not gate.broken


def test_a_wait_with_a_time_out_of_its_own(gate: Gate) -> None:
    inner = Inner()
    with pytest.raises(CommsError, match=r"not complete after 0\.1 s"):
        work(gate, inner).wait(timedelta(seconds=0.1))
    inner.end()


def test_futures_hold_outputs_or_errors(gate: Gate) -> None:
    good, bad, lost = Inner(), Inner(), Inner()
    futures = [work(gate, inner).get_future() for inner in (good, bad, lost)]
    assert len(gate.proxies) == 3
    good.end()
    bad.end("Connection reset by peer")
    assert futures[0].wait() == [torch.ones(1)]
    with pytest.raises(RuntimeError, match="reset by peer"):
        futures[1].wait()
    gate.board.interrupt(1, FAULT)
    assert [w.label for w in gate.stale(1)] == ["0 allreduce"]
    assert gate.fail_proxies(1) == 1
    with pytest.raises(RuntimeError, match="aborted by a fault"):
        futures[2].wait()
    assert not gate.proxies
    lost.end()  # later than ever: nothing is completed twice


def test_futures_of_the_present_incarnation_are_left_alone(gate: Gate) -> None:
    gate.board.interrupt(1, FAULT)
    gate.board.current = 1
    inner = Inner()
    future = work(gate, inner).get_future()
    assert gate.fail_proxies(1) == 0
    inner.end()
    assert future.wait() == [torch.ones(1)]


def test_an_operation_without_a_future_leaves_no_proxy(gate: Gate) -> None:
    with pytest.raises(RuntimeError, match="getFuture"):
        work(gate, Inner(future=False), "send").get_future()
    assert not gate.proxies


class Group0:
    """Stands where a communicator's group stands, for errors that are raised when an operation is issued."""

    def __init__(self, error: str) -> None:
        self._error = error

    def send(self, *_: object) -> Work:
        raise RuntimeError(self._error)


class Communicator:
    def __init__(self, group: object) -> None:
        self.group: ProcessGroup = group  # type: ignore[assignment]

    def abandon(self) -> Callable[[], bool]:
        return lambda: True


def broken_handle(gate: Gate, error: str) -> Handle:
    gate.connect = lambda handle: Communicator(Group0(error))
    return Handle(gate, Group(name="0", ranks=(0, 1), backend="gloo"), 0)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def test_a_connection_that_is_found_broken_at_the_issue(gate: Gate) -> None:
    """Gloo raises at once then. It is the peer's fault, not this rank's, also when the notice takes a while."""
    handle = broken_handle(gate, GLOO)
    later(0.15, lambda: gate.board.interrupt(1, FAULT))
    with pytest.raises(Interrupted):
        handle.send([torch.ones(1)], 1, 0)


def test_a_connection_that_is_found_broken_at_the_issue_without_a_cause(gate: Gate) -> None:
    with pytest.raises(CommsError, match="Connection closed"):
        broken_handle(gate, GLOO).send([torch.ones(1)], 1, 0)
    assert gate.broken


def test_a_wrong_argument_is_the_script_s_own_error(gate: Gate) -> None:
    with pytest.raises(RuntimeError, match="Invalid scalar type") as caught:
        broken_handle(gate, "Invalid scalar type").send([torch.ones(1)], 1, 0)
    assert not isinstance(caught.value, CommsError)
    assert not gate.broken


def test_graves_empty_when_operations_end(gate: Gate) -> None:
    yard, ended = Graveyard(), threading.Event()

    class Old(Communicator):
        def abandon(self) -> Callable[[], bool]:
            return ended.is_set

    yard.bury([Old(None)], [])
    yard.bury([Communicator(None)], [])
    time.sleep(0.5)
    assert len(yard) == 1
    ended.set()
    deadline = time.monotonic() + 5
    while len(yard) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(yard) == 0


def test_a_graveyard_has_one_thread_at_most(gate: Gate) -> None:
    """A burial that comes just when the thread is about to end must not leave two of them."""
    yard = Graveyard()

    class Old(Communicator):
        def __del__(self) -> None:
            if not again.is_set():
                again.set()
                yard.bury([Communicator(None)], [])

    again = threading.Event()
    yard.bury([Old(None)], [])
    again.wait(5)
    deadline = time.monotonic() + 5
    while (len(yard) or [t for t in threading.enumerate() if t.name == "instep-graveyard"]) and time.monotonic() < deadline:
        assert len([t for t in threading.enumerate() if t.name == "instep-graveyard"]) <= 2
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "instep-graveyard"]


STUCK = """
session.recoverable(lambda: None)()
gate = session._engine.gate
gate.recording = False
if rank == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    gate.bury()
    assert gate.graves() == 1
else:
    time.sleep(5)
"""
LATE = """
if rank == 0:
    dist.send(torch.ones(1), 1)
    got = torch.zeros(1)
    dist.recv(got, 1)
    save(got=got.item())
else:
    time.sleep(1.5)
    dist.recv(torch.zeros(1), 0)
    time.sleep(1.5)
    dist.send(torch.full((1,), 4.0), 0)
"""


def test_a_grave_that_never_empties_does_not_keep_a_rank_from_ending(tmp_path: Path, sessions: Server) -> None:
    """Gloo's destructor waits for operations that it has lost, until they time out."""
    died: dict[int, float] = {}

    def seen(what: object) -> None:
        if isinstance(what, Died):
            died[what.rank] = time.monotonic()

    told = play(STUCK, tmp_path, sessions, ranks=2, on_event=seen)
    assert told.outcome.code == 0, told.all_said[-2000:]
    assert died[1] - died[0] > 1.5


def test_messages_may_take_longer_than_connecting(tmp_path: Path, sessions: Server) -> None:
    settings = {"plugins.init_gloo": {"connect_timeout": 1.0}}
    prologue = PROLOGUE.replace("session.protect", "session.recoverable(lambda: None)()\n(lambda **_: None)")
    told = play(LATE, tmp_path, sessions, ranks=2, prologue=prologue, settings=settings)
    assert told.outcome.code == 0, told.all_said[-2000:]
    assert told.saved[0]["got"] == 4


@pytest.mark.parametrize("op", ["allreduce", "recv"])
@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_a_work_from_before_a_recovery_is_lost(gate: Gate, op: str, error: str | None) -> None:
    """Nobody will complete it, and its failure is no news about the present connections."""
    inner = Inner()
    old = work(gate, inner, op)
    gate.board.interrupt(1, FAULT)
    gate.board.current = 1
    if error is not None:
        inner.end(error)
    with pytest.raises(CommsError, match="before a recovery"):
        old.wait()
    assert not gate.broken
    if error is None:
        inner.end()
