"""The job of the recovery tests: one of everything that has state, small enough for a step of a few milliseconds."""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from instep.testing.finals import digest

if TYPE_CHECKING:
    from instep.plain import PlainSession

Batch = tuple[Tensor, Tensor]


class Midway(torch.autograd.Function):
    """The identity, with a place for a fault in the middle of forward and of backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        point("mid_forward")
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
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
                x = Midway.apply(x)  # type: ignore[no-untyped-call]
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


def seed(value: int) -> None:
    """Seed every global generator."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 - the global state is the point


def agreed_salt(rank: int, world_size: int) -> int:
    """Set-up collectives whose results matter: a replacement must be given the same ones."""
    salt = [rank * 17 + 5]
    dist.broadcast_object_list(salt, src=0)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2
    return salt[0]


class Training:
    """All objects of the job, and what is done with them in a step."""

    def __init__(self, args: argparse.Namespace, session: "instep.Session | PlainSession") -> None:
        self.args, self.session = args, session
        self.salt = agreed_salt(session.rank, session.world_size)
        samples, held_out = Samples(16 * session.world_size * 5), Samples(8 * session.world_size)
        self.loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, seed=args.seed), num_workers=args.workers)
        self.validation = DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False))
        self.model = DistributedDataParallel(Network(args.width), bucket_cap_mb=0.005)
        self.parameters = nn.ParameterList(self.model.parameters())
        self.average = AveragedModel(self.parameters, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        matrices = {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 0.1}
        vectors = {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([matrices, vectors], lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        self.history: dict[str, list[float]] = {"losses": []}

    def shared(self) -> dict[str, Any]:
        """What a donor gives, by name."""
        names = ("model", "average", "optimizer", "scheduler", "scaler", "history")
        return {name: getattr(self, name) for name in names}

    def step(self, first: Batch, second: Batch) -> None:
        """Two micro-batches, with a validation before them now and then, and the commit."""
        measured = self.validate() if self.session.step % self.args.validate == 0 else None
        time.sleep(self.args.pause)
        with self.model.no_sync():
            self.backward(first)
        self.backward(second)
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.parameters, 0.5)
        with self.session.commit():
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.average.update_parameters(self.parameters)
            self.optimizer.zero_grad()
            if measured is not None:
                self.history["losses"] = [*self.history["losses"], measured]

    def backward(self, batch: Batch) -> None:
        x, y = batch
        self.scaler.scale(nn.functional.cross_entropy(self.model(x + 0.001 * self.salt), y) / 2).backward()

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        loss = torch.zeros(1)
        for x, y in self.validation:
            point("validation")
            loss += nn.functional.cross_entropy(self.model(x), y)
        self.model.train()
        dist.all_reduce(loss)
        return loss.item()

    def final(self, steps: int) -> dict[str, object]:
        """What a run with faults must share with one without."""
        return {
            "steps": steps,
            "salt": self.salt,
            **{name: digest(obj if isinstance(obj, dict) else obj.state_dict()) for name, obj in self.shared().items()},
            "torch": digest(torch.get_rng_state()),
            "numpy": digest(np.random.get_state()[1].tolist()),  # type: ignore[index]  # noqa: NPY002
            "python": digest(random.getstate()),
            "epoch": self.loader.epoch,  # type: ignore[attr-defined]
            "training": self.model.training,
        }


def main() -> None:
    args = arguments()
    session = instep.init()
    seed(args.seed * 100 + session.rank)
    training = Training(args, session)
    session.protect(**training.shared(), loader=training.loader)

    @session.recoverable
    def train() -> int:
        while session.step < args.steps:
            batches = iter(training.loader)
            for first, second in zip(batches, batches, strict=False):
                training.step(first, second)
                if args.stats:
                    with (args.out / f"stats-{session.rank}.jsonl").open("a") as file:
                        file.write(json.dumps({"step": session.step, **stats()}) + "\n")
                if session.step == args.steps:
                    break
        return session.step

    steps = train()
    (args.out / f"final-{session.rank}.json").write_text(json.dumps(training.final(steps)))


if __name__ == "__main__":
    main()
