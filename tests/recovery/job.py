"""The job of the recovery tests: one of everything that has state, small enough for a step of a few milliseconds."""

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import instep
from instep.testing import point


class Midway(torch.autograd.Function):
    """The identity, with a place for a fault in the middle of forward and of backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        point("mid_forward")
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        point("mid_backward")
        return gradient


class Block(nn.Module):
    """Linear, BatchNorm, ReLU, Dropout: parameters, buffers and random draws."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Network(nn.Module):
    """Six blocks, with the midway point between the third and the fourth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList([Block(width) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2:
                x = Midway.apply(x)
        result: Tensor = self.last(x)
        return result


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs with noise that is drawn when they are fetched, as an augmentation does."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x[:, :4].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(16) + 0.01 * random.random() + 0.01 * float(np.random.random()), self.y[index]  # noqa: NPY002 - the global state is the point


def digest(tree: object) -> str:
    """A digest of everything below ``tree``, independent of what is under test."""
    state = hashlib.sha256()

    def feed(node: object) -> None:
        if isinstance(node, Tensor):
            state.update(str((node.dtype, tuple(node.shape))).encode())
            state.update(node.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for key, value in node.items():
                state.update(repr(key).encode())
                feed(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                feed(value)
        else:
            state.update(repr(node).encode())

    feed(tree)
    return state.hexdigest()[:16]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--validate", type=int, default=4, help="steps between validations")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep in a step")
    parser.add_argument("--stats", action="store_true", help="write threads, open files and memory after each step")
    return parser.parse_args()


def stats() -> dict[str, int]:
    """What this process holds: threads, open files, resident memory in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
        "rss": int(status["VmRSS"].split()[0]),
        "pid": os.getpid(),
    }


def main() -> None:
    args = arguments()
    session = instep.init()
    torch.manual_seed(args.seed * 100 + session.rank)
    random.seed(args.seed * 100 + session.rank)
    np.random.seed(args.seed * 100 + session.rank)  # noqa: NPY002 - the global state is the point
    salt: list[object] = [session.rank * 17 + 5]
    dist.broadcast_object_list(salt, src=0)  # a set-up collective whose value matters
    total = torch.tensor([session.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == session.world_size * (session.world_size + 1) / 2

    samples, held_out = Samples(16 * session.world_size * 5), Samples(8 * session.world_size)
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, seed=args.seed), num_workers=args.workers)
    validation = DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False))
    model = DistributedDataParallel(Network(args.width), bucket_cap_mb=0.005)
    parameters = nn.ParameterList(model.parameters())
    average = AveragedModel(parameters, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    history: dict[str, object] = {"validations": 0, "losses": []}
    session.protect(model=model, average=average, optimizer=optimizer, scheduler=scheduler, scaler=scaler, history=history, loader=loader)

    def backward(batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        scaler.scale(nn.functional.cross_entropy(model(x + 0.001 * salt[0]), y) / 2).backward()

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        loss = torch.zeros(1)
        for x, y in validation:
            point("validation")
            loss += nn.functional.cross_entropy(model(x), y)
        model.train()
        dist.all_reduce(loss)
        return loss.item()

    def pairs() -> Iterable[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        batches = iter(loader)
        return zip(batches, batches, strict=False)

    @session.recoverable
    def train() -> int:
        while session.step < args.steps:
            for first, second in pairs():
                measured = validate() if session.step % args.validate == 0 else None
                time.sleep(args.pause)
                with model.no_sync():
                    backward(first)
                backward(second)
                scaler.unscale_(optimizer)
                clip_grad_norm_(parameters, 0.5)
                with session.commit():
                    scaler.step(optimizer)
                    scaler.update()
                    scheduler.step()
                    average.update_parameters(parameters)
                    optimizer.zero_grad()
                    if measured is not None:
                        history["validations"] = int(str(history["validations"])) + 1
                        history["losses"] = [*history["losses"], measured]  # type: ignore[misc]
                if args.stats:
                    with (args.out / f"stats-{session.rank}.jsonl").open("a") as file:
                        file.write(json.dumps({"step": session.step, **stats()}) + "\n")
                if session.step == args.steps:
                    break
        return session.step

    steps = train()
    final = {
        "steps": steps,
        "salt": salt[0],
        "model": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "average": digest(average.state_dict()),
        "scheduler": digest(scheduler.state_dict()),
        "scaler": digest(scaler.state_dict()),
        "history": digest(history),
        "torch": digest(torch.get_rng_state()),
        "numpy": digest(np.random.get_state()[1].tolist()),  # type: ignore[union-attr,index]  # noqa: NPY002
        "python": digest(random.getstate()),
        "epoch": loader.epoch,  # type: ignore[attr-defined]
        "training": model.training,
    }
    (args.out / f"final-{session.rank}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
