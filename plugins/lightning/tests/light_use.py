"""Uses of the callback that are wrong or unusual, by name; each prints what comes of it."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from light_callbacks import Counting
from light_job import Net, loaders
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision

from instep.errors import UsageError
from instep_lightning import InstepCallback, attach, supported

RANKS = 2


class Raising(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            raise ValueError("this callback has a mistake")


class Told(Callback):
    """What Lightning's teardown would tell a callback."""

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        print(f"teardown after {type(exception).__name__}", flush=True)


class Other(Precision):
    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(optimizer, model, closure, **kwargs)


class Batches:
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.randn(10, 8), torch.zeros(10, dtype=torch.long))] * 4)

    def __len__(self) -> int:
        return 4


def trainer(*callbacks: Callback, ranks: int = RANKS, **options: Any) -> Trainer:
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "max_epochs": 1}
    return Trainer(**{"accelerator": "cpu", "devices": ranks, "strategy": "ddp", "callbacks": list(callbacks), **plain, **options})


def net(mode: str = "automatic") -> Net:
    torch.manual_seed(1)
    return Net(Namespace(mode=mode))


def refused(what: str, **options: Any) -> None:
    try:
        supported.check(trainer(*options.pop("callbacks", ()), **options))
    except UsageError as error:
        print(f"REFUSED {what}: {error}", flush=True)


def refusals() -> None:
    """Run on one rank, without `instep run`."""
    refused("spawn", strategy="ddp_spawn")
    refused("precision", strategy="auto", ranks=1, plugins=[Other()])
    refused("swa", callbacks=[StochasticWeightAveraging(1e-2)])
    if hasattr(theirs, "WeightAveraging"):  # Lightning 2.6
        print("THERE average", flush=True)
        refused("average", callbacks=[theirs.WeightAveraging()])
    refused("reload", reload_dataloaders_every_n_epochs=1)
    refused("hook", strategy=_hooked())


def fsdp() -> None:
    """Lightning itself refuses it without a GPU."""
    refused("fsdp", accelerator="gpu", strategy="fsdp", ranks=1)


def _hooked() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(ddp_comm_hook=lambda state, bucket: None)


def alone() -> None:
    """Without `instep run`."""
    done = trainer(InstepCallback(), ranks=1, strategy="auto")
    done.fit(net(), *loaders())
    print("TRAINED", done.global_step, flush=True)


def raising() -> None:
    trainer(InstepCallback(), Raising(), Told()).fit(net(), *loaders())


def twice() -> None:
    one = trainer(InstepCallback(), Told())
    one.fit(net(), *loaders())
    one.fit_loop.max_epochs = 2
    one.fit(net(), *loaders())


def then_test() -> None:
    """Validate, fit, test, predict."""
    one, model, (training, held_out) = trainer(InstepCallback(), Counting()), Tested(Namespace(mode="automatic")), loaders()
    before = one.validate(model, held_out, verbose=False)
    one.fit(model, training, held_out)
    after = one.test(model, held_out, verbose=False)
    predicted = one.predict(model, held_out) or []
    print("TESTED", one.global_step, before[0]["held_out"] > after[0]["held_out"], len(predicted), flush=True)


def batches() -> None:
    trainer(InstepCallback()).fit(net(), Batches())


def detached() -> None:
    """The one place that is changed, and given back."""
    own = Trainer._run
    attach.attach(InstepCallback)
    attach.attach(InstepCallback)
    changed = Trainer._run is not own
    attach.detach()
    print("DETACHED", changed, Trainer._run is own, flush=True)


class Tested(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.body(batch[0]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        globals()[case]()
