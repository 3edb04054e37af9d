"""What is wrong is said at once, with the rank and what to do."""

import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.errors import CommsError, ConfigError
from instep.hooks import CommsRequest, Interruption, Job
from instep.model import Address, AddressBook, Fault, Group, Json, Status, Unrecoverable, Vote
from instep_init_nccl import backend, health
from instep_init_nccl.mini_root import MiniRoot
from instep_init_nccl.plugin import InitNccl
from instep_init_nccl.swaps import SWAPS

JOB = Job(rank=3, world_size=4, local_rank=3, birth=0, host="127.0.0.1", secret=b"s")
GROUP = Group(name="tp", ranks=(1, 3), backend="nccl")
NO_CUDA = pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")


def book(notes: Sequence[Mapping[str, Json]]) -> AddressBook:
    addresses = tuple(Address(rank=rank, birth=0, host="127.0.0.1") for rank in range(len(notes)))
    return AddressBook(incarnation=7, addresses=addresses, notes=tuple({"init_nccl": dict(note)} if note else {} for note in notes))


def note(nccl: str, port: int = 1) -> dict[str, Json]:
    return {"host": "10.0.0.1", "port": port, "nccl": nccl}


@NO_CUDA
def test_a_torch_without_nccl() -> None:
    plugin = InitNccl()
    plugin.start(JOB)
    with pytest.raises(ConfigError, match=r"rank 3: backend nccl was asked for, and torch \S+ is built without it: install a CUDA build"):
        plugin.announce([GROUP])


@pytest.mark.parametrize(
    ("count", "local", "share", "part"),
    [
        (0, 0, False, "rank 5: backend nccl was asked for, and torch .* sees no GPU: check nvidia-smi"),
        (2, 2, False, "rank 5: local rank 2 has no GPU of its own, this machine shows 2: start fewer ranks"),
    ],
)
def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, count: int, local: int, share: bool, part: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=part):
        health.device_of(5, local, share=share)


def test_a_gpu_may_be_shared_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert health.device_of(1, 1, share=True) == torch.device("cuda", 0)


def test_an_nccl_that_is_too_old() -> None:
    with pytest.raises(ConfigError, match=r"rank 2: NCCL 2.17.1 is too old, 2.18 is needed: install a newer nvidia-nccl"):
        health.version_of(2, (2, 17, 1))
    assert health.version_of(2, (2, 18, 0)) == "2.18.0"
    assert [backend.head((2, 28, 9)), backend.head((2, 29, 2)), backend.head((2, 32, 3))] == [16, 20, 20]


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommsError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            MiniRoot(secret=b"", host="127.0.0.1", port=port)


def test_a_port_inside_the_ephemeral_range() -> None:
    assert health.port_of(0, 5, None) == 0
    assert health.port_of(0, 5, 17000, "32768 60999") == 17005
    with pytest.raises(ConfigError, match=r"rank 6: plugins.init_nccl.port = 32766 gives it port 32768, inside the range 32768-60999"):
        health.port_of(6, 2, 32766, "32768\t60999\n")
    assert Path(health.EPHEMERAL).exists()


def test_ranks_with_different_nccl() -> None:
    notes = [{}, note("2.27.5"), note("2.27.5"), note("2.30.7")]
    with pytest.raises(ConfigError, match=r"'tp' .* has ranks with different NCCL: 2.27.5 on rank 1; 2.30.7 on rank 3\. Install one"):
        health.roots(GROUP, book(notes), "init_nccl")


def test_a_member_that_announced_nothing() -> None:
    with pytest.raises(CommsError, match=r"'tp' in incarnation 7: rank 1 announced nothing for it; enable init_nccl on all ranks"):
        health.roots(GROUP, book([{}, {}, {}, note("2.27.5")]), "init_nccl")


def test_roots_come_in_group_order() -> None:
    turned = GROUP.model_copy(update={"ranks": (3, 1)})
    assert health.roots(turned, book([{}, note("2.27.5", 11), {}, note("2.27.5", 33)]), "init_nccl") == (("10.0.0.1", 33), ("10.0.0.1", 11))


# ---- a machine without a GPU, where only gloo is used


def test_without_nccl_groups_nothing_is_opened() -> None:
    before = threading.active_count()
    plugin = InitNccl()
    plugin.start(JOB)
    gloo = Group(name="0", ranks=(0, 1, 2, 3), backend="gloo")
    assert plugin.announce([gloo]) is None
    assert plugin.reinit_comms(CommsRequest("gloo", 3, 0, [gloo], book([{}] * 4), lambda: None)) is None
    fault = Fault(kind="exit", ranks=(0,), detail="", detected_by="test", at=0.0)
    plugin.quiesce(Interruption(1, fault, acknowledging=True))
    plugin.close()
    assert threading.active_count() == before


# ---- swaps run out


def vote(rank: int, note: dict[str, Any] | None) -> Vote:
    return Vote(
        rank=rank,
        birth=0,
        incarnation=9,
        block=0,
        step=4,
        status=Status.CLEAN,
        groups=(),
        address=Address(rank=rank, birth=0, host="h"),
        notes={} if note is None else {"init_nccl": note},
    )


def test_before_swaps_run_out_the_next_rung_is_taken() -> None:
    plugin = InitNccl()
    votes = [vote(0, None), vote(1, {"swaps": SWAPS - 1}), vote(2, {"swaps": 3})]
    assert plugin.plan(votes) is None
    answer = plugin.plan([*votes, vote(3, {"swaps": SWAPS})])
    assert isinstance(answer, Unrecoverable)
    assert answer.incarnation == 9
    assert answer.why == (
        f"rank 3 has connected its NCCL groups {SWAPS} times, and torch has no room for more in one process: the job has to start again"
    )
