"""Plain handles: a group of exactly the stock type whose backend is swapped, with gloo inside since there is no GPU."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nccl_on_cpu import install
from session_world import fault, play, same
from torch._C._distributed_c10d import HashStore, PrefixStore

from instep.agent import records
from instep.agent.agent import Launch, serving
from instep.agent.records import Header
from instep.agent.spawner import Server
from instep.arguments import GroupOptions
from instep.board import Board
from instep.errors import CommsError
from instep.model import Group
from instep.torch.gate import Gate
from instep.torch.plain_handle import FIRST, LAST, PlainHandle
from instep.torch.tape import Tape

CPU = torch.device("cpu")
GROUP = Group(name="w", ranks=(0, 1), backend="nccl")
OPTIONS = GroupOptions(timeout=20.0)
Make = Callable[..., Gate]


@dataclass
class Connected:
    """A gloo communicator in the shape of a plugin's."""

    group: dist.ProcessGroup

    def abandon(self) -> Callable[[], bool]:
        return lambda: True


@pytest.fixture
def make_gate() -> Iterator[Make]:
    """Makes gates of ranks that have a record and nothing else."""
    files: list[int] = []

    def make(*, loopback: bool) -> Gate:
        header, setup = records.create("test-header"), os.memfd_create("test-setup")
        files.extend((header, setup))
        return Gate(Board(), Header(header), Tape(setup), loopback=loopback)

    yield make
    for file in files:
        os.close(file)


def pair(store: HashStore, rank: int, incarnation: int) -> Connected:
    """A real gloo group of two threads."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = timedelta(seconds=20)
    backend = dist.ProcessGroupGloo(PrefixStore(str(incarnation), store), rank, 2, options)
    outer = dist.ProcessGroup(HashStore(), rank, 2)
    outer._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    outer._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return Connected(outer)


def both(run: Callable[[int], object]) -> list[object]:
    """What two ranks return, each in a thread."""
    out: list[object] = [None, None]
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            out[rank] = run(rank)
        except BaseException as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    return out


def test_twenty_swaps_under_one_group(make_gate: Make) -> None:
    """Sums, barriers, messages and operations that torch's C++ calls by itself are right after each; the group is always the same."""
    store = HashStore()

    def run(rank: int) -> object:
        gate = make_gate(loopback=False)
        gate.connect = lambda _handle: pair(store, rank, 0)
        handle = PlainHandle(gate, GROUP, rank, OPTIONS)
        group = handle.process_group
        seen = []
        for incarnation in range(1, 21):
            total = torch.full((3,), float(rank + incarnation))
            group.allreduce([total]).wait()
            rows = torch.zeros(2)
            group._allgather_base(rows, torch.tensor([float(rank)])).wait()
            message = torch.tensor([float(rank)])
            work = group.send([message], 1 - rank, 7) if rank else group.recv([message], 1 - rank, 7)
            work.wait()
            group.barrier().wait()
            seen.append((total[0].item(), rows.tolist(), message.item()))
            handle.communicator = pair(store, rank, incarnation)
        assert handle.process_group is group
        assert type(group) is dist.ProcessGroup
        assert handle.communicator is not None
        assert group._get_backend(CPU) is handle.communicator.group._get_backend(CPU)
        return seen

    expected = [(float(2 * n + 1), [0.0, 1.0], 1.0) for n in range(1, 21)]
    assert both(run) == [expected, expected]


def test_the_last_swap_is_followed_by_a_clear_error(make_gate: Make) -> None:
    gate = make_gate(loopback=True)
    handle = PlainHandle(gate, GROUP, 0, OPTIONS)
    inner = PlainHandle(gate, GROUP, 0, OPTIONS).process_group
    for _ in range(FIRST, LAST + 1):
        handle.communicator = Connected(inner)
    with pytest.raises(CommsError, match=r"'w' was connected 249 times, and torch has no room .* the job has to start again"):
        handle.communicator = Connected(inner)


def test_in_loopback_torch_answers_alone(make_gate: Make) -> None:
    group = PlainHandle(make_gate(loopback=True), GROUP, 0, OPTIONS).process_group
    value = torch.tensor([3.0])
    group.allreduce([value]).wait()
    group.broadcast(value, 1).wait()
    group.barrier().wait()
    rows = [torch.zeros(1), torch.zeros(1)]
    group.allgather([rows], [value]).wait()
    assert [value.item(), *(row.item() for row in rows)] == [3.0, 3.0, 3.0]


def test_a_group_that_was_never_connected_is_forgotten(make_gate: Make) -> None:
    gate = make_gate(loopback=False)
    with pytest.raises(CommsError, match="before the job is joined"):
        PlainHandle(gate, GROUP, 0, OPTIONS)
    assert gate.handles == []


# ---- in a job


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A warm fork server whose ranks find the plugin."""
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        with serving(Launch(script="none.py", nproc=3)) as server:
            yield server


SETTINGS = {"backend": "nccl", "plugins.nccl_on_cpu": True}
SCRIPT = """
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel

world = dist.group.WORLD
assert type(world) is dist.ProcessGroup
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters())
ring = dist.new_group([0, 1, 2], backend="nccl", timeout=timedelta(seconds=33))
gloo = dist.new_group([0, 1, 2], backend="gloo")
session.protect(model=model, optimizer=optimizer)

@session.recoverable
def train():
    inside = dist.new_group([0, 2], backend="nccl")
    while session.step < 8:
        x = torch.randn(4, 4)
        model(x).square().mean().backward()
        got = torch.zeros(1)
        operations = [
            dist.P2POp(dist.isend, x[0, :1].clone(), (rank + 1) % 3, group=ring),
            dist.P2POp(dist.irecv, got, (rank - 1) % 3, group=ring),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if rank != 1:
            dist.all_reduce(got, group=inside)
        dist.all_reduce(got, group=gloo)
        with session.commit():
            optimizer.step()
            optimizer.zero_grad()
            weights.add_(got)

train()
assert dist.group.WORLD is world and type(world) is dist.ProcessGroup
save(weights=weights.tolist(), model=[p.tolist() for p in model.parameters()])
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_job_on_plain_groups_goes_on_bit_for_bit(tmp_path: Path, plain: Server, victim: int) -> None:
    clean = play(SCRIPT, tmp_path / "clean", plain, settings=SETTINGS)
    faults = [fault("kill", victim, "step", 3), fault("raise", 2, "step", 6)]
    other = play(SCRIPT, tmp_path / "faults", plain, *faults, settings=SETTINGS)
    same([clean, other])
    assert len(other.outcome.incidents) == 2
    assert {incident.scope for incident in other.outcome.incidents} == {"in_process"}


def test_without_a_plugin_the_backend_is_named_with_what_to_do(tmp_path: Path, plain: Server) -> None:
    told = play("", tmp_path, plain, settings={"backend": "nccl"})
    assert told.outcome.code
    assert "no enabled plugin connects backend 'nccl': pip install 'instep[init-nccl]' and set plugins.init_nccl = true" in told.all_said
