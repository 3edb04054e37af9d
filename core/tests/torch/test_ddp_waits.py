"""DDP in a backward pass waits in Python for gloo's own futures: it ends on a fault, and gloo's thread runs no Python."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from told_work import Told, gate_of_one
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from instep.errors import CommsError, Interrupted
from instep.model import Fault, Group
from instep.torch import gate as gate_module
from instep.torch.gate import Gate
from instep.torch.handle import Handle

FAULT = Fault(kind="exit", ranks=(1,), detail="gone", detected_by="agent", at=0.0)


class Reduction(Told):
    """An all-reduce of three ranks that hold the same."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: Future[list[Tensor]] = Future()

    def end(self, error: str | None = None) -> None:
        if error is None:
            for tensor in self._tensors:
                tensor.mul_(3)
            self._future.set_result(self._tensors)
        super().end(error)

    def get_future(self) -> "Future[list[Tensor]]":
        return self._future


class Peers:
    """Stands where a communicator's group stands: keeps what was issued, for the test to end it."""

    def __init__(self) -> None:
        self.issued: list[Reduction] = []
        self.group: ProcessGroup = self  # type: ignore[assignment]

    def allreduce(self, tensors: Sequence[Tensor], *_: object) -> Work:
        self.issued.append(Reduction(list(tensors)))
        return self.issued[-1]

    def abandon(self) -> Callable[[], bool]:
        return lambda: True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(gate_module, "_NOTICE", 0.3)
    with gate_of_one() as made:
        yield made


def wrapped(gate: Gate) -> tuple[DistributedDataParallel, Peers]:
    """A model of several buckets."""
    handle, peers = connected(gate)
    with handle.scripted([]):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), process_group=handle, bucket_cap_mb=0.0002)
        backward(model)
        model(torch.ones(2, 8))  # here the one bucket of the first step becomes several
    model.zero_grad()
    return model, peers


def connected(gate: Gate) -> tuple[Handle, Peers]:
    peers = Peers()
    gate.connect = lambda _: peers
    return Handle(gate, Group(name="0", ranks=(0, 1, 2), backend="gloo"), 0), peers


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def end(works: Iterable[Reduction], error: str | None = None) -> None:
    for work in works:
        work.end(error)


def later(seconds: float, call: Callable[[], object]) -> None:
    threading.Timer(seconds, call).start()


def test_a_backward_pass_ends_with_its_reductions(gate: Gate) -> None:
    model, peers = wrapped(gate)
    later(0.15, lambda: end(peers.issued))
    backward(model)
    assert len(peers.issued) > 1
    assert not gate.proxies
    assert gate.header.get("waiting") == 0
    assert model.module[2].bias.grad.tolist() == [2.0] * 8  # two samples, a third of three times that


@pytest.mark.parametrize("lost", [0, -1])
def test_a_reduction_that_gloo_has_lost_ends_with_the_notice_of_a_fault(gate: Gate, lost: int) -> None:
    model, peers = wrapped(gate)
    later(0.1, lambda: end(w for w in peers.issued if w is not peers.issued[lost]))
    later(0.2, lambda: gate.board.interrupt(1, FAULT))
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        backward(model)
    assert time.monotonic() - begin < 2


def test_a_broken_connection_is_the_peer_s_fault(gate: Gate) -> None:
    model, peers = wrapped(gate)
    later(0.1, lambda: end(peers.issued, "Connection closed by peer"))
    with pytest.raises(CommsError, match="allreduce: Connection closed by peer"):
        backward(model)
    assert gate.broken


def test_what_a_script_waits_for_inside_of_backward_is_not_put_off(gate: Gate) -> None:
    """A hook of the script asks for a future, and waits for it right there."""
    handle, peers = connected(gate)
    seen: list[object] = []

    def reduced(gradient: Tensor) -> Tensor:
        work = handle.allreduce([gradient.clone()])
        later(0.1, peers.issued[0].end)
        seen.append(len(gate.proxies))
        seen.append(work.get_future().wait())
        return gradient

    weights = torch.ones(2, requires_grad=True)
    weights.register_hook(reduced)
    weights.sum().backward()
    assert seen[0] == 0
    assert isinstance(seen[1], list)
    assert seen[1][0].tolist() == [3.0, 3.0]
    assert not gate.proxies
