"""One training of NeMo under recovery: Lightning's, with Megatron's model and optimizer in one adapter."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from instep_lightning import data
from instep_lightning.adopt import adopted, members
from instep_lightning.fit import Fit
from instep_lightning.flavour import Foreign
from instep_lightning.record import Record
from instep_lightning.strategy import Averaging
from instep_lightning.undo import Undo
from instep_nemo import supported
from instep_nemo.adapter import NemoMegatron
from instep_nemo.loops import AUTOMATIC, NEMO_LOOPS
from instep_nemo.mapped import rewind
from instep_nemo.passes import Passes
from instep_nemo.record import NemoRecord
from instep_nemo.strategy import CommittingStrategy, Joined

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.session import Session


class NemoFit(Fit):
    """The training of one trainer with MegatronStrategy."""

    strategy: ClassVar[Mapping[str, object]] = members(Averaging) | members(Joined) | members(CommittingStrategy)
    loops: ClassVar[Mapping[str, Mapping[str, object]]] = NEMO_LOOPS

    def __init__(self, trainer: "Trainer", session: "Session") -> None:
        super().__init__(trainer, session)
        self._later = ExitStack()
        self._told: dict[str, float | None] = {"grad_norm": None, "num_zeros_in_grad": None}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """As Lightning's; what NeMo makes in set-up is given back first."""
        with super().attached(), self._later:
            yield

    def prepare(self) -> None:
        """Everything is set up, adapters of PEFT too, the first batch not fetched: protect it all."""
        trainer: Foreign = self.trainer
        strategy = trainer.strategy
        self._transform()
        supported.check_built(trainer, self.session)
        self._later.enter_context(adopted(trainer.fit_loop.epoch_loop.automatic_optimization, self.loops[AUTOMATIC], self))
        self._set_up_validation()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._undo = Undo(strategy.optimizers, schedulers)
        loaders = data.loaders(trainer)
        validation = getattr(trainer.fit_loop.epoch_loop.val_loop._combined_loader, "flattened", ())
        passes = Passes(loaders.values(), validation, int(getattr(strategy.data_sampler, "init_consumed_samples", 0)))
        self._later.enter_context(passes.kept())
        self.record = NemoRecord(trainer, self.effects, self._undo, passes)
        shared = {f"scheduler{i}": scheduler for i, scheduler in enumerate(schedulers)}
        for loader in loaders.values():
            rewind(loader)
        private = {**loaders, "lightning": self.record}
        self.session.protect(training=NemoMegatron(strategy, self._told), update=self._told, private=private, **shared)
        data.begin(trainer)

    def log_update(self) -> None:
        """What NeMo's strategy logs behind the update, once more: the record was written before it."""
        module: Foreign = self.trainer.lightning_module
        module._current_fx_name = "optimizer_step"
        for key, value in self._told.items():
            if value is not None:
                module.log(key, torch.tensor(value, device=self.trainer.strategy.root_device), batch_size=1)
        module._current_fx_name = None

    def _rejoin(self, record: Record) -> None:
        super()._rejoin(record)
        if record.midway and isinstance(record, NemoRecord):
            record.rejoin()

    def _transform(self) -> None:
        """NeMo would transform the model, and make its optimizer, when the first epoch begins."""
        from nemo.lightning.pytorch.callbacks import ModelTransform

        for callback in self.trainer.callbacks:
            if isinstance(callback, ModelTransform):
                callback._maybe_apply_transform(self.trainer)
