"""What cannot be recovered is refused before anything of it is built, by name and with what to use instead."""

from typing import TYPE_CHECKING

from torch.optim import LBFGS

from instep.errors import UsageError
from instep_lightning.flavour import root

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STRATEGIES = ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy")
_PRECISIONS = ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")
_CALLBACKS = {
    "BaseFinetuning": "it adds parameters to the optimizer while training runs",
    "BatchSizeFinder": "it trains on its own inside of fit; find the batch size in a run of its own",
    "LearningRateFinder": "it trains on its own inside of fit; find the rate in a run of its own",
    "ModelPruning": "it changes parameters outside of the optimizer's step",
    "StochasticWeightAveraging": "it changes parameters outside of the optimizer's step",
    "WeightAveraging": "its average is no state that a checkpoint of the callback would hold",
}


def check(trainer: "Trainer") -> None:
    """Before set-up. Raises ``UsageError`` for a strategy, a precision, a callback or an option of the trainer that is not supported."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if type(strategy).__name__ == "FSDPStrategy":
        raise UsageError(
            "FSDPStrategy flattens parameters and keeps its communication out of reach: a step cannot be taken back; use "
            "ModelParallelStrategy with fully_shard (FSDP2) in configure_model, on a two-dimensional mesh if each shard is to have replicas"
        )
    if any(cls.__name__ == "MegatronStrategy" for cls in type(strategy).__mro__):
        raise UsageError(
            "MegatronStrategy needs the callback of instep-nemo: `from instep_nemo import InstepCallback` (pip install 'instep-nemo[nemo]')"
        )
    if not _is(strategy, _STRATEGIES):
        raise UsageError(f"{type(strategy).__name__} is not supported: use DDPStrategy or ModelParallelStrategy (FSDP2)")
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise UsageError("ddp_spawn, ddp_fork and ddp_notebook start processes themselves; `instep run` has done so: use strategy='ddp'")
    if getattr(strategy, "_ddp_comm_hook", None) is not None or getattr(strategy, "_model_averaging_period", None) is not None:
        raise UsageError("DDPStrategy with a communication hook or model averaging keeps state that no rank could restore; leave it out")
    if not _is(precision, _PRECISIONS):
        raise UsageError(f"{type(precision).__name__} is not supported: use 32, 64, bf16 or 16, true or mixed")
    check_options(trainer)


def check_options(trainer: "Trainer") -> None:
    """What holds for any strategy. Raises ``UsageError`` for a callback or an option of the trainer that is not supported."""
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS and cls.__module__.startswith(root(trainer)):
                raise UsageError(f"the callback {type(callback).__name__} is not supported: {_CALLBACKS[cls.__name__]}")
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError("reload_dataloaders_every_n_epochs makes loaders while training runs, which no replacement has; leave it out")


def check_built(trainer: "Trainer") -> None:
    """Behind set-up. Raises ``UsageError`` for an optimizer or a way to fetch batches that cannot be recovered."""
    for optimizer in trainer.strategy.optimizers:
        if isinstance(optimizer, LBFGS):
            raise UsageError("LBFGS runs forward and backward many times in one step, which cannot be committed; use another optimizer")
    fetcher = trainer.fit_loop._data_fetcher
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise UsageError("training_step(dataloader_iter) fetches batches itself, so nobody knows where it stands; let it take a batch")
    if fetcher is not None and fetcher.length is None:
        raise UsageError("training data without a length is read ahead by Lightning; give the data set a __len__")


def _is(obj: object, names: tuple[str, ...]) -> bool:
    """Whether the class of ``obj`` is one of these, or a subclass that leaves the optimizer's step to it."""
    for cls in type(obj).__mro__:
        if cls.__name__ in names:
            return True
        if "optimizer_step" in vars(cls) or "setup" in vars(cls):
            return False
    return False
