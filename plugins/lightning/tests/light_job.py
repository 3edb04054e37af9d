"""The job of these tests: a small training in Lightning with one of everything, and digests of all that a fault must not change."""

import argparse
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from light_callbacks import Counting, Dying, Waiting
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

from instep.testing import point
from instep.testing.finals import digest
from instep_lightning import InstepCallback

ROWS = 240
SHARDED = {"fsdp": (2, 2), "buddies": (4, 1)}
"""Sizes of the mesh: of the second, each shard is on one rank alone."""


class Midway(torch.autograd.Function):
    """The identity, with a place for a fault in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        point("in_backward")
        return gradient


class Net(LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        norm: nn.Module = nn.LayerNorm(32) if args.mode in SHARDED else nn.BatchNorm1d(32)
        self.body = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)
        self.mean = MeanMetric()
        self.outputs: list[Tensor] = []
        self.held_out: dict[str, int] = {}
        self.automatic_optimization = args.mode != "manual"

    def configure_model(self) -> None:
        if self.args.mode in SHARDED and not isinstance(self.head.weight, DTensor):
            whole: Any = self.device_mesh  # two-dimensional: each shard has a replica
            mesh = whole if self.args.mode == "fsdp" else whole["data_parallel"]
            for part in (self.body, self.head):
                fully_shard(part, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(Midway.apply(self.body(x))), y)  # type: ignore[no-untyped-call]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        point("training_step")
        if not self.automatic_optimization:
            return self.by_hand(batch, batch_idx)
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.outputs.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def by_hand(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if (batch_idx + 1) % self.args.accumulate == 0:
            first.step()
            point("between_optimizers")
            second.step()
            first.zero_grad()
            second.zero_grad()
            for scheduler in self.lr_schedulers():
                scheduler.step()
        self.outputs.append(loss)
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss.detach()}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        point("optimizer_step")
        if self.trainer.global_step < 4:  # a warm-up by hand, behind the step
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * (self.trainer.global_step + 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        point("validation")
        self.log("held_out", self.loss(batch) + 0.1 * torch.rand(()), sync_dist=True)
        if not self.trainer.sanity_checking:  # Lightning leaves that check out when it restarts
            self.held_out["batches"] = self.held_out.get("batches", 0) + 1

    def on_train_epoch_end(self) -> None:
        self.log("collected", torch.stack([torch.zeros(()), *self.outputs]).mean(), sync_dist=True)
        self.log("batches", float(len(self.outputs)) + self.held_out.get("batches", 0), sync_dist=True)
        self.outputs.clear()  # as Lightning has scripts collect what steps return

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            first, second = torch.optim.SGD(self.body.parameters(), 0.1, momentum=0.9), torch.optim.AdamW(self.head.parameters(), 1e-2)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 3), torch.optim.lr_scheduler.StepLR(second, 5)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.args.mode == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "held_out", "interval": "epoch"}}
        each = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
        epochs = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": each, "interval": "step"}, {"scheduler": epochs, "interval": "epoch"}]


def loaders(workers: int = 0, stateful: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """``stateful``: over how many ranks a loader that tells its position has its order."""
    random_numbers = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS + 60, 8, generator=random_numbers)
    data = TensorDataset(x, x[:, :4].argmax(dim=1))
    training, rest = torch.utils.data.Subset(data, range(ROWS)), torch.utils.data.Subset(data, range(ROWS, ROWS + 60))
    held_out = DataLoader(rest, batch_size=10)
    if stateful:
        loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        return loader(training, batch_size=10, sampler=DistributedSampler(training, stateful, int(os.environ["RANK"]))), held_out
    return DataLoader(training, batch_size=10, shuffle=True, num_workers=workers), held_out


def final(trainer: Trainer, net: Net, counting: Counting) -> dict[str, object]:
    state = trainer.fit_loop.epoch_loop
    return {
        "parameters": digest(dict(net.named_parameters())),
        "buffers": digest(dict(net.named_buffers())),
        "optimizers": digest([[o.state[p] for g in o.param_groups for p in g["params"]] for o in trainer.optimizers]),
        "rates": [[g["lr"], g["weight_decay"]] for o in trainer.optimizers for g in o.param_groups],
        "schedules": digest([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": digest(np.random.get_state()[1].tolist()),  # type: ignore[index]  # noqa: NPY002 - the global state is the point
        "counters": [trainer.global_step, trainer.current_epoch, state.total_batch_idx, state._batches_that_stepped],
        "metrics": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "counting": counting.state_dict(),
        "kept": [net.held_out, digest(net.outputs)],
        "stopped": trainer.should_stop,
        "scale": digest(trainer.precision_plugin.state_dict()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="automatic", choices=["automatic", "plateau", "manual", *SHARDED])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--scaled", action="store_true", help="half precision with a gradient scaler")
    parser.add_argument("--saved", action="store_true", help="wait in the middle of the run until a checkpoint of instep is complete")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--die", type=int, help="the step in which all ranks die")
    parser.add_argument("--lost", default="", help="which ranks, in place of all")
    parser.add_argument("--harm", nargs="*", default=[], help="what becomes of checkpoints before that, the newest first")
    parser.add_argument("--save", type=int, default=0, help="steps from one checkpoint to the next, in place of the best ones")
    parser.add_argument("--whole", action="store_true", help="checkpoints in one file, where the strategy could save parts")
    parser.add_argument("--resume", help="a checkpoint of ModelCheckpoint to go on from")
    parser.add_argument("--stateful", action="store_true", help="a loader that tells its position")
    parser.add_argument("--plain", action="store_true", help="without the callback")
    return parser.parse_args()


def made(args: argparse.Namespace, counting: Counting, **more: Any) -> Trainer:
    mine: list[Callback] = [] if args.plain else [InstepCallback()]
    if args.saved:
        from instep_state_replica.checkpoint_files import usable

        mine.append(Waiting(lambda: any(usable(args.out / "saved", args.ranks, []))))
    if args.die is not None:
        mine.append(Dying([int(r) for r in args.lost.split(",") if r] or list(range(args.ranks)), args.die, args.harm))
    often: dict[str, Any] = {"monitor": "held_out", "save_top_k": 2, "every_n_epochs": 1}
    if args.save:
        often = {"every_n_train_steps": args.save, "save_top_k": -1, "filename": "{step}", "auto_insert_metric_name": False}
    saving = ModelCheckpoint(dirpath=args.out / "checkpoints", **often)
    automatic: dict[str, Any] = {} if args.mode == "manual" else {"accumulate_grad_batches": args.accumulate, "gradient_clip_val": 1.0}
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": args.ranks,
        "strategy": ModelParallelStrategy(*mesh, save_distributed_checkpoint=not args.whole) if (mesh := SHARDED.get(args.mode)) else "ddp",
        "max_epochs": args.epochs,
        "plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0, growth_interval=5))] if args.scaled else None,
        "precision": None if args.scaled else args.precision,
        "log_every_n_steps": 1,
        "val_check_interval": 0.5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(args.out, name="", version="log"),
        "callbacks": [*mine, counting, EarlyStopping("held_out", patience=50), LearningRateMonitor("step"), saving],
    }
    return Trainer(**{**options, **automatic, **more})


def main() -> None:
    torch.set_num_threads(1)
    args = arguments()
    seed_everything(3, verbose=False)
    counting, net = Counting(), Net(args)
    trainer = made(args, counting)
    trainer.fit(net, *loaders(args.workers, args.stateful * args.ranks), ckpt_path=args.resume)
    (args.out / f"final-{trainer.global_rank}.json").write_text(json.dumps(final(trainer, net, counting)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
