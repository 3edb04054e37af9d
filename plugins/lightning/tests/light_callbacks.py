"""Callbacks of the test job: one of a user, one that loses ranks, one that waits for a checkpoint."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import light_damage as damage
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from instep.session import current
from instep.testing import point


class Counting(Callback):
    """A user's callback with state, which looks at batches and at what came of them."""

    def __init__(self) -> None:
        self.seen, self.total, self.epochs = 0, 0.0, 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        point("batch_end")
        self.seen += len(batch[0])
        self.total += float(outputs["loss"]) * (batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        point("epoch_end")
        self.epochs += 1

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        point("epoch_start")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total, "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.total, self.epochs = state_dict["seen"], state_dict["total"], state_dict["epochs"]


class Dying(Callback):
    """Ranks that are lost together, once: all of them have reached the step. ``harm``: what the newest checkpoints suffer before."""

    def __init__(self, ranks: list[int], step: int, harm: list[str]) -> None:
        self.ranks, self.step, self.harm = ranks, step, harm

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        session = current()
        if session is not None and not session.incarnation and session.step == self.step:
            torch.distributed.barrier()
            if session.rank == 0 and isinstance(saving := trainer.checkpoint_callback, ModelCheckpoint):
                newest = sorted(Path(str(saving.dirpath)).iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
                for path, how in zip(newest, self.harm, strict=False):
                    damage.HARM[how](path)
            torch.distributed.barrier()
            if session.rank in self.ranks:
                os.kill(os.getpid(), signal.SIGKILL)


class Waiting(Callback):
    """Saving goes on beside the training, which takes no time here."""

    def __init__(self, there: Callable[[], bool]) -> None:
        self.there = there

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        deadline = time.monotonic() + 60
        while trainer.current_epoch == 2 and not self.there():
            assert time.monotonic() < deadline, "no checkpoint is complete"
            time.sleep(0.01)
