"""Several loaders for training and for validation, and three loggers at once, one of which takes no step twice."""

import argparse
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from light_callbacks import Counting
from light_job import Net, final
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from instep.testing import point
from instep.testing.finals import digest
from instep_lightning import InstepCallback


class Served(Logger):
    """As a tracking server does it: a run is gone on with by its id, and a step that is behind the last one is an error."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def name(self) -> str:
        return "served"

    @property
    def version(self) -> str:
        return "one"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if rank_zero_only.rank:
            return
        told = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        last = told[-1]["step"] if told else -1
        if step is None or step < last:
            raise ValueError(f"step {step} is behind step {last}")
        if any(line["step"] == step and set(line) & set(metrics) - {"epoch"} for line in told):
            raise ValueError(f"step {step} has {sorted(metrics)} already")
        with self.file.open("a") as lines:
            lines.write(json.dumps({**{key: float(value) for key, value in metrics.items()}, "step": step}) + "\n")


class Varied(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        point("training_step")
        losses = [self.loss(part) for part in batch.values() if part is not None]
        loss = torch.stack(losses).mean()
        self.outputs.append(loss.detach())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"first": losses[0], "last": losses[-1]}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        point(f"validation{dataloader_idx}")
        self.log("held_out", self.loss(batch), sync_dist=True)


def rows(count: int, seed: int) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=10, shuffle=seed < 2)


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard shows of all files of a version."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for file in sorted(folder.glob("events.*")) for event in EventFileLoader(str(file)).Load()]
    return [
        (value.tag, event.step, value.tensor.float_val[0]) for event in events for value in event.summary.value if value.tensor.float_val
    ]


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mode", default="max_size_cycle")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    seed_everything(3, verbose=False)
    counting, net = Counting(), Varied(Namespace(mode="automatic"))
    trainer = Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=1,
        val_check_interval=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[CSVLogger(args.out, name="", version="log"), Served(args.out / "served.jsonl"), TensorBoardLogger(args.out, name="board")],
        callbacks=[
            *([] if args.plain else [InstepCallback()]),
            LearningRateMonitor("step"),
            ModelCheckpoint(dirpath=args.out / "checkpoints", monitor="held_out/dataloader_idx_1", save_top_k=2),
        ],
    )
    training = CombinedLoader({"long": rows(240, 0), "short": rows(150, 1)}, args.mode)
    trainer.fit(net, training, [rows(60, 2), rows(90, 3)])
    told: dict[str, object] = final(trainer, net, counting)
    if trainer.global_rank == 0:
        told["board"] = scalars(args.out / "board" / "version_0")
        told["boards"] = len(list((args.out / "board").iterdir()))
        told["served"] = digest((args.out / "served.jsonl").read_text())
    (args.out / f"final-{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
