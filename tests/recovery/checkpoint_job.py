"""A job that saves checkpoints, loses all copies of some state at once, and tells what it ended with.

Arguments: the kind of job, and JSON with ``kill`` (ranks that die together, before ``at``), ``wait`` (the checkpoint that must be
complete by then) ``harm`` (what then becomes of checkpoints, by the names of ``HARM``) and ``then`` (the same once more, after the
recovery).
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep
from instep.session import Session

STEPS, SECONDS = 14, 30.0
CHECKPOINTS = Path("checkpoints")


def flip(folder: Path) -> None:
    """One bit of one part is another one."""
    part = folder / "rank-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


def flip_record(folder: Path) -> None:
    """One bit of what rank 0 alone reads is another one."""
    part = folder / "rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + json.loads(data[8:begin])["record/0"]["data_offsets"][0]] ^= 1
    part.write_bytes(data)


def cut(folder: Path) -> None:
    """One part is shorter than it was."""
    part = folder / "rank-00001.safetensors"
    os.truncate(part, part.stat().st_size - 8)


def lose(folder: Path) -> None:
    """The part of one rank is gone, receipt and all: that rank died while it wrote."""
    for file in folder.glob("rank-00001.*"):
        file.unlink()


def blur(folder: Path) -> None:
    """One receipt is another one."""
    receipt = folder / "rank-00000.json"
    receipt.write_text(receipt.read_text().replace("1", "2", 1))


HARM: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "record": flip_record,
    "cut": cut,
    "lose": lose,
    "blur": blur,
    "remove": shutil.rmtree,
}


def hsdp(session: Session) -> tuple[nn.Module, DataLoader[tuple[torch.Tensor, ...]] | None, list[AveragedModel]]:
    """Two replicas, each sharded over half of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, session.world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(9, 16), nn.Dropout(0.1), nn.Linear(16, 9)) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, None, []


def ddp(session: Session) -> tuple[nn.Module, DataLoader[tuple[torch.Tensor, ...]] | None, list[AveragedModel]]:
    """Small buckets, statistics, an average with a counter that commits move, and a shuffled loader."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(90, 9))
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, seed=3))
    bare = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 9))
    average = AveragedModel(nn.ParameterList(bare.parameters()), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    del session
    return DistributedDataParallel(bare, bucket_cap_mb=0.002), loader, [average]


def keep(
    session: Session, model: nn.Module, parts: dict[str, Any], loader: Any
) -> tuple[Callable[[int], None], Callable[[int | None], int]]:
    """A script that saves by itself at the start of each epoch, and tells instep how to load."""

    def folder(step: int) -> Path:
        return CHECKPOINTS / f"own-{step}-{session.rank}.pt"

    def save(epoch: int) -> None:
        CHECKPOINTS.mkdir(exist_ok=True)
        state = {"epoch": epoch, "model": model.state_dict(), "random": random.getstate(), "torch": torch.get_rng_state()}
        torch.save(state | {name: part.state_dict() for name, part in parts.items()}, folder(session.step).with_suffix(".new"))
        folder(session.step).with_suffix(".new").replace(folder(session.step))

    @session.on_checkpoint
    def load(step: int | None) -> int:
        dist.barrier()  # collectives work here
        steps = [int(file.name.split("-")[1]) for file in CHECKPOINTS.glob(f"own-*-{session.rank}.pt")]
        if step is None and session.rank == 1:
            steps.remove(max(steps))  # this rank sees less than the others
        found = max(steps) if step is None else step
        saved = torch.load(folder(found), weights_only=False)
        model.load_state_dict(saved["model"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        random.setstate(saved["random"])
        torch.set_rng_state(saved["torch"])
        loader.epoch = saved["epoch"]
        return found

    return save, load


def receipts(folder: Path, since: float) -> int:
    """How many ranks have saved their part of a checkpoint since then."""
    times = []
    for file in folder.glob("rank-*.json"):
        with suppress(FileNotFoundError):  # it is about to be written anew
            times.append(file.stat().st_mtime)
    return sum(time > since for time in times)


def die(session: Session, orders: dict[str, Any]) -> None:
    """Wait for the checkpoint, harm what is to be harmed, and die with the others; later perhaps once more, as ``then`` tells."""
    mark, before = Path("died"), Path("never")
    if session.incarnation:
        orders, mark, before = orders.get("then", {}), Path("died-again"), mark
    if session.step != orders.get("at") or mark.exists():
        return
    since = before.stat().st_mtime if before.exists() else 0.0
    wait, until = orders.get("wait"), time.monotonic() + SECONDS
    while wait and receipts(CHECKPOINTS / str(wait), since) < session.world_size:
        assert time.monotonic() < until, f"{wait} is not complete"
        time.sleep(0.01)
    dist.barrier()
    if session.rank == 0:
        mark.touch()
        for name, harm in orders.get("harm", {}).items():
            HARM[str(harm)](CHECKPOINTS / name)
    dist.barrier()
    if session.rank in orders["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The script."""
    torch.set_num_threads(1)
    kind, orders = sys.argv[1], json.loads(sys.argv[2])
    session = instep.init(step=orders.get("start", 0))
    assert isinstance(session, Session)
    torch.manual_seed(0)
    random.seed(session.rank)
    np.random.seed(session.rank)  # noqa: NPY002 - the generator that records keep
    model, loader, more = {"hsdp": hsdp, "ddp": ddp, "own": ddp}[kind](session)
    torch.manual_seed(100 + session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    named: dict[str, Any] = {f"more{i}": obj for i, obj in enumerate(more)}
    if loader is not None:
        named["loader"] = loader
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, **named)
    save = None
    if kind == "own":
        save, load = keep(session, model, {"optimizer": optimizer, "scheduler": scheduler, "average": more[0]}, loader)
        if "start" in orders:
            load(orders["start"])
    done: list[int] = []

    def step(batch: torch.Tensor) -> None:
        die(session, orders)
        noise = random.random()
        (model(batch) * noise).square().mean().backward()
        with session.commit():
            optimizer.step()
            scheduler.step()
            for average in more:
                average.update_parameters(nn.ParameterList(model.parameters()))
            optimizer.zero_grad()
        done.append(session.step)

    @session.recoverable
    def train() -> None:
        while session.step < STEPS:
            if loader is None:
                step(torch.randn(5, 9))
                continue
            if save is not None and session.step % len(loader) == 0:
                save(session.step // len(loader))
            for (batch,) in loader:
                step(batch)
                if session.step == STEPS:
                    return

    train()
    state = session._engine.state
    result = {"state": {**state.shared.digests(), **state.private.digests()}, "done": done, "birth": session.incarnation}
    Path(f"final-{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
