"""The job of these tests: the model of the example with one of everything around it, and digests of all that a fault must not change."""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import nemo_warm  # noqa: F401 - first: it makes NeMo importable without CUDA
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from nemo import lightning as nl

from instep.testing import point
from instep.testing.finals import digest
from instep_nemo import InstepCallback

sys.path.insert(0, str(next(up / "examples" for up in Path(__file__).parents if (up / "examples" / "train_nemo_plain.py").exists())))

import train_nemo_plain as plain


class Counting(Callback):
    """A user's callback with state, which looks at batches and at what came of them; each of its hooks is a place for a fault."""

    def __init__(self) -> None:
        self.seen, self.total, self.epochs, self.validated = 0, 0.0, 0, 0

    def on_train_epoch_start(self, trainer: Any, module: LightningModule) -> None:
        point("epoch_start")

    def on_train_batch_start(self, trainer: Any, module: LightningModule, batch: Any, batch_idx: int) -> None:
        point("batch_start")

    def on_megatron_step_start(self, step: Any) -> Any:
        point("step_start")
        return step

    def on_megatron_microbatch_end(self, step: Any, batch: Any, forward_callback: Any, output: Any) -> None:
        point("microbatch_end")

    def on_megatron_step_end(self, step: Any, microbatch_outputs: Any, reduced: Any = None) -> None:
        point("step_end")

    def on_validation_batch_start(self, trainer: Any, module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        point("validation")
        self.validated += not trainer.sanity_checking

    def on_train_batch_end(self, trainer: Any, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        point("batch_end")
        self.seen += int(batch["tokens"].sum())
        self.total += float(outputs["loss"]) * (batch_idx + 1)
        module.log("tokens", batch["tokens"].float().mean(), on_step=False, on_epoch=True)

    def on_train_epoch_end(self, trainer: Any, module: LightningModule) -> None:
        point("epoch_end")
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("seen", "total", "epochs", "validated")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, value in state_dict.items():
            setattr(self, key, value)


class Saving(Callback):
    """Leaves the weights as a checkpoint of NeMo's when the training ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder, weights_only=True)


class Data(plain.Data):
    """The example's data, in any order that NeMo has."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.steps // 2)
        self.data_sampler.dataloader_type = args.order
        self.workers = args.workers

    def train_dataloader(self) -> Any:
        data = super().train_dataloader().dataset
        return torch.utils.data.DataLoader(data, num_workers=self.workers)


def final(trainer: Any, counting: Counting) -> dict[str, object]:
    strategy = trainer.strategy
    parts = strategy.optimizers[0].mcore_optimizer.chained_optimizers
    parameters = [p for part in parts for g in part.optimizer.param_groups for p in g["params"]]
    sampler = strategy.data_sampler
    return {
        "parameters": digest([list(chunk.parameters()) for chunk in strategy.megatron_parallel]),
        "main": digest(parameters),
        "moments": digest([part.optimizer.state[p] for part in parts for g in part.optimizer.param_groups for p in g["params"]]),
        "groups": digest([{k: v for k, v in g.items() if k != "params"} for part in parts for g in part.optimizer.param_groups]),
        "rates": [g["lr"] for g in strategy.optimizers[0].param_groups],
        "schedules": digest([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": digest(np.random.get_state()[1].tolist()),  # type: ignore[index]  # noqa: NPY002 - the global state is the point
        "tracker": digest(get_cuda_rng_tracker().get_states()),
        "counters": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped],
        "batch": get_current_global_batch_size(),
        "sampled": [int(sampler.prev_consumed_samples), sampler.if_first_step, sampler.prev_global_batch_size],
        "metrics": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "counting": counting.state_dict(),
        "training": digest([module.training for chunk in strategy.megatron_parallel for module in (chunk, *chunk.module.modules())]),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--order", default="single", choices=["single", "cyclic", "batch"], help="in which samples are dealt out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--limit", type=int, help="steps in an epoch, if not all")
    parser.add_argument("--sanity", type=int, default=0, help="batches that are validated in set-up")
    parser.add_argument("--save", action="store_true", help="leave a checkpoint of NeMo's in out/pretrained")
    parser.add_argument("--pretrained", help="folder of a checkpoint whose weights are fine-tuned, through NeMo's resume")
    parser.add_argument("--plain", action="store_true", help="without the callback")
    return parser.parse_args()


def made(args: argparse.Namespace, *callbacks: Any, **more: Any) -> Any:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": args.ranks,
        "strategy": nl.MegatronStrategy(
            tensor_model_parallel_size=args.tensor_parallel,
            pipeline_model_parallel_size=args.pipeline,
            num_distributed_optimizer_instances=args.instances,
            ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            ckpt_async_save=False,
        ),
        "plugins": nl.MegatronMixedPrecision(precision="bf16-mixed"),
        "max_steps": args.steps,
        "limit_train_batches": args.limit,
        "limit_val_batches": 4,  # micro-batches, and a multiple of those of a step: NeMo would stop in the middle of one
        "val_check_interval": 3,
        "num_sanity_val_steps": args.sanity,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
        "logger": CSVLogger(args.out, name="", version="log"),
        "callbacks": [*([] if args.plain else [InstepCallback()]), *callbacks],
    }
    return nl.Trainer(**{**options, **more})


def main() -> None:
    torch.set_num_threads(1)
    args = arguments()
    gpt, transforms = plain.model(args.peft)
    counting = Counting()
    trainer = made(args, *transforms, counting, *([Saving(args.out / "pretrained")] if args.save else []))
    if args.pretrained is not None:
        nl.AutoResume(restore_config=nl.RestoreConfig(path=args.pretrained, load_artifacts=False)).setup(trainer, gpt)
    trainer.fit(gpt, Data(args))  # two epochs
    (args.out / f"final-{trainer.global_rank}.json").write_text(json.dumps(final(trainer, counting)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
