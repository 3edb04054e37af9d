"""Uses of the callback that are wrong or unusual, by name; each prints what comes of it. Run on one rank, without `instep run`."""

import sys
import warnings
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nemo_job
import torch
import train_nemo_plain
from lightning.pytorch import Trainer
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

import instep_lightning
from instep.errors import UsageError
from instep_lightning import supported as plain
from instep_lightning.callback import InstepCallback as LightningCallback
from instep_nemo import InstepCallback, supported


def says(check: Any, trainer: Any) -> str:
    try:
        check(trainer)
    except UsageError as error:
        return str(error)
    return "nothing"


def strategy(**options: Any) -> Any:
    return nl.MegatronStrategy(ckpt_async_save=False, **options)


def trainer(kind: Any) -> Any:
    return nl.Trainer(accelerator="cpu", devices=1, strategy=kind, logger=False, enable_checkpointing=False, enable_progress_bar=False)


def refusals() -> None:
    megatron = trainer(strategy(ddp=DistributedDataParallelConfig()))
    fsdp = trainer(strategy())
    fsdp.strategy._fsdp = "megatron"  # its own constructor wants a GPU
    print("REFUSED nothing:", says(supported.check, megatron))
    print("REFUSED fsdp:", says(supported.check, fsdp))
    print("REFUSED pytorch:", says(supported.check, trainer(strategy(ddp="pytorch"))))
    print("REFUSED ddp:", says(supported.check, trainer("ddp")))
    print("REFUSED lightning:", says(plain.check, megatron))


def described() -> None:
    """As recipes and NeMo's trainer have it: a description that makes the callback when it is built."""
    import fiddle
    import nemo_run

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recipe = nemo_run.Config(Trainer, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        recipe.callbacks = [nemo_run.Config(InstepCallback)]
        built = fiddle.build(recipe)
        mine = next(callback for callback in built.callbacks if isinstance(callback, InstepCallback))
        copied = deepcopy(mine)
    print("DESCRIBED", isinstance(mine, LightningCallback), isinstance(fiddle.build(copied), InstepCallback))
    print("WARNED", sum("without `instep run`" in str(w.message) for w in said))


def alone() -> None:
    """Without `instep run` it trains as ever, and what was changed is NeMo's own again."""
    args = Namespace(tensor_parallel=1, pipeline=1, instances=1, ranks=1, steps=2, sanity=0, plain=False, limit=None)
    with TemporaryDirectory() as out:
        args.out = Path(out)
        gpt, _ = train_nemo_plain.model(peft=False)
        done = nemo_job.made(args, val_check_interval=1, logger=False)
        done.fit(gpt, train_nemo_plain.Data(2))
    print("TRAINED", done.global_step, type(done.strategy) is nl.MegatronStrategy, instep_lightning.__name__)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        globals()[case]()
        sys.stdout.flush()
