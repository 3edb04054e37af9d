"""Process groups behind handles: every way to make one, every way to use one, before and inside a block, across faults."""

from pathlib import Path

import pytest
from session_world import Told, fault, play, same

from instep.agent.spawner import Server

USES = """
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed._functional_collectives as funcol

def exercise(pair, mesh, gloo):
    out = []
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank + 1)})
    out.append(objects)
    box = [("from", rank)]
    dist.broadcast_object_list(box, src=2)
    out.append(list(box[0]))
    gathered = [None] * 4 if rank == 3 else None
    dist.gather_object(rank * 2, gathered, dst=3)
    scattered = [None]
    dist.scatter_object_list(scattered, [[i, "s"] for i in range(4)] if rank == 0 else None, src=0)
    out += [gathered, scattered]
    t = torch.tensor([float(rank + 1)])
    works = [dist.all_reduce(t, async_op=True), dist.barrier(async_op=True)]
    for work in works:
        work.wait()
    out.append(t.item())
    reduced = dist.all_reduce(torch.ones(2) * rank, async_op=True).get_future().then(lambda f: f.value()[0].sum().item()).wait()
    out.append(reduced)
    if pair is not None:
        s = torch.tensor([10.0 ** rank])
        dist.all_reduce(s, group=pair)
        out.append(s.item())
    peer = rank ^ 1
    got = torch.zeros(1)
    if rank < peer:
        dist.send(torch.tensor([float(rank)]), peer)
        source = dist.recv(got)
        out.append(source)
    else:
        dist.recv(got, peer)
        dist.send(torch.tensor([float(rank)]), peer)
    out.append(got.item())
    dist.barrier()  # else a rank that takes from anybody takes the next message
    send, recv = torch.tensor([float(rank)]), torch.zeros(1)
    ops = [dist.P2POp(dist.isend, send, (rank + 1) % 4), dist.P2POp(dist.irecv, recv, (rank - 1) % 4)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    out.append(recv.item())
    for dim in ("a", "b"):
        row = torch.tensor([1.0 + rank])
        dist.all_reduce(row, group=mesh.get_group(dim))
        out.append(row.item())
    pieces = torch.zeros(4)
    dist.all_gather_into_tensor(pieces, torch.tensor([float(rank)]), group=gloo)
    out.append(pieces.tolist())
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, torch.arange(4.0), group=gloo)
    out.append(mine.item())
    swapped = torch.zeros(4)
    dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank)
    out.append(swapped.tolist())
    out.append(funcol.all_reduce(torch.ones(1) * rank, "sum", mesh["a"]).item())
    out.append(funcol.all_gather_tensor(torch.tensor([rank]), 0, mesh["b"]).tolist())
    out.append(funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, dist.group.WORLD).tolist())
    out.append(dist.get_process_group_ranks(gloo))
    return out

def keep(row):
    (OUT / f"row-{rank}-{session.step}").write_text(json.dumps(row))

def kept():
    return [json.loads((OUT / f"row-{rank}-{step}").read_text()) for step in range(session.step)]

def make():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if session.step:
        point("made")
    own, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return pairs[rank // 2], own, mesh, dist.new_group(backend="gloo")
"""

OUTSIDE = (
    USES
    + """
pair, own, mesh, gloo = make()
before = exercise(pair, mesh, gloo)
dist.all_reduce(torch.ones(1), group=own)
@session.recoverable
def train():
    while session.step < 4:
        keep(exercise(pair, mesh, gloo))
        with session.commit():
            weights.add_(float(session.step))

train()
dist.destroy_process_group(pair)
save(before=before, seen=kept(), weights=weights.tolist())
dist.destroy_process_group()
"""
)

INSIDE = (
    USES
    + """
def train():
    pair, own, mesh, gloo = make()
    while session.step < 4:
        keep([exercise(pair, mesh, gloo), pair.group_name])
        dist.all_reduce(torch.ones(1), group=own)
        with session.commit():
            weights.add_(float(session.step))

session.recoverable(train)()
session.recoverable(lambda: train() if session.step < 4 else None)()
outside = dist.new_group([0, 3])
save(seen=kept(), weights=weights.tolist(), name=outside.group_name if rank in (0, 3) else None)
"""
)


def test_groups_made_before_the_block(tmp_path: Path, sessions: Server) -> None:
    clean = play(OUTSIDE, tmp_path / "clean", sessions, ranks=4)
    faults = [fault("kill", 1, "collective", 1), fault("raise", 2, "barrier", 2), fault("kill", 0, "prepared", 3)]
    broken = play(OUTSIDE, tmp_path / "broken", sessions, *faults, ranks=4)
    same([clean, broken])
    assert len(broken.outcome.fired) == 3
    assert clean.saved[0]["before"] == clean.saved[0]["seen"][0]  # type: ignore[index]
    assert {i.scope for i in broken.outcome.incidents} == {"in_process"}


@pytest.fixture(scope="module")
def inside(sessions: Server, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return play(INSIDE, tmp_path_factory.mktemp("inside") / "clean", sessions, ranks=4)


@pytest.mark.parametrize(
    "faults",
    [
        [fault("kill", 1, "collective", 1), fault("raise", 3, "record", 2)],
        [fault("kill", 2, "barrier", 1), fault("raise", 0, "barrier", 3)],
        [fault("kill", 2, "body", 1), fault("raise", 3, "made", birth=None)],
    ],
    ids=["between", "in-the-barrier", "behind-the-barrier"],
)
def test_groups_made_inside_the_block_are_made_again(inside: Told, faults: list[object], tmp_path: Path, sessions: Server) -> None:
    broken = play(INSIDE, tmp_path / "broken", sessions, *faults, ranks=4)  # type: ignore[arg-type]
    same([inside, broken])
    assert len(broken.outcome.fired) == 2
    assert {i.scope for i in broken.outcome.incidents} == {"in_process"}


CUT = """
import torch.distributed.distributed_c10d as c10d

def cut(name):
    real = getattr(c10d, name)
    def once(*args, **kwargs):
        setattr(c10d, name, real)
        raise RuntimeError(f"cut before {name}")
    setattr(c10d, name, once)

places = ["_register_process_group", "BackendConfig", "_process_group_name"]

@session.recoverable
def train():
    if rank == 0 and places and session.step == 1:
        cut(places.pop())
    group = dist.new_group([0, 1])
    while session.step < 3:
        total = torch.ones(1)
        dist.all_reduce(total, group=group) if rank < 2 else None
        dist.barrier()
        with session.commit():
            weights.add_(1)
        if session.step == 1 and rank == 0 and places:
            raise RuntimeError("again")

train()
save(weights=weights.tolist(), names=sorted(c10d._world.pg_names.values()))
"""


def test_a_group_whose_making_was_cut_is_made_again(tmp_path: Path, sessions: Server) -> None:
    told = play(CUT, tmp_path, sessions, settings={"limits.same_fault": 20, "limits.recoveries_without_commit": 20})
    assert told.outcome.code == 0, told.all_said[-4000:]
    assert [saved["weights"] for saved in told.saved] == [[3.0] * 4] * 3
    assert {str(saved["names"]) for saved in told.saved} == {"['0']"}
    assert len(told.outcome.incidents[0].attempts) + len(told.outcome.incidents) >= 4
