"""One training under recovery: what is protected, where the block begins, and how a step is committed.

A step of instep is an optimizer step of Lightning: it runs from the end of one commit to the end of the next. What Lightning does behind
an optimizer step (hooks, logs, validation, the next epoch's beginning) is the first part of the next step, and is done again after a
fault; see ``loops`` for how it is entered.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer

from instep.agent.channel import Environment
from instep.errors import UsageError
from instep.torch.effects import Effects
from instep_lightning import callbacks, data, loggers, supported
from instep_lightning.adopt import adopted, members
from instep_lightning.loops import LOOPS
from instep_lightning.record import Record
from instep_lightning.rung import Rung
from instep_lightning.strategy import Averaging, RecoverableStrategy
from instep_lightning.undo import Undo

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.session import Session


class Fit:
    """The training of one trainer. ``inside``: the block is running."""

    strategy: ClassVar[Mapping[str, object]] = members(Averaging) | members(RecoverableStrategy)
    loops: ClassVar[Mapping[str, Mapping[str, object]]] = LOOPS
    """What the strategy and the loops get while the training runs; those of another framework may need something else."""

    def __init__(self, trainer: "Trainer", session: "Session") -> None:
        self.trainer, self.session = trainer, session
        self.inside = False
        self.record: Record | None = None
        self.effects = Effects(session)
        self.rung = Rung(trainer, session, self.effects)
        self._undo = Undo((), ())
        self._committing: ExitStack | None = None
        self._opened = False
        self._newcomer = Environment.read().birth > 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The trainer's loops, strategy and loggers belong to this training; undone at the end."""
        trainer = self.trainer
        if type(trainer.strategy).__name__ == "ModelParallelStrategy":
            trainer.num_sanity_val_steps = 0  # whole parameters would be gathered in set-up, and kept for replacements
        with ExitStack() as stack:
            stack.enter_context(loggers.once(trainer, self.session, self.effects))
            for path, added in self.loops.items():
                loop: object = trainer
                for name in path.split("."):
                    loop = getattr(loop, name)
                stack.enter_context(adopted(loop, added, self))
            stack.enter_context(adopted(trainer.strategy, self.strategy, self))
            yield

    def prepare(self) -> None:
        """Everything is set up, the first batch not fetched: protect it all."""
        trainer = self.trainer
        supported.check_built(trainer)
        self._set_up_validation()
        strategy = trainer.strategy
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        assert strategy.model is not None
        shared: dict[str, object] = {"model": strategy.model}
        shared |= {f"optimizer{i}": optimizer for i, optimizer in enumerate(strategy.optimizers)}
        shared |= {f"scheduler{i}": scheduler for i, scheduler in enumerate(schedulers)}
        shared |= {} if scaler is None else {"scaler": scaler}
        self._undo = Undo(strategy.optimizers, [*schedulers, *([] if scaler is None else [scaler])])
        self.record = Record(trainer, self.effects, self._undo)
        loaders, ready = data.loaders(trainer), data.positions(trainer)
        self.session.protect(**shared, private={**loaders, "lightning": self.record})
        cursors = data.cursors(trainer)
        data.begin(trainer, ready)
        self.rung.ready(self.record, self._undo, cursors)

    def block(self, run: Callable[[], object]) -> Callable[[], None]:
        """Lightning's loop over epochs, to be called again after each fault."""

        def train() -> None:
            self._enter()
            run()

        return train

    @property
    def midway(self) -> bool:
        """Whether the block was entered behind an optimizer step, and the rest of that batch is to be done first."""
        return self.inside and self.record is not None and self.record.midway

    def resumed(self) -> tuple[object, object]:
        """The rest of that batch is being done now: what came of it, and the batch, where somebody looks at them."""
        assert self.record is not None
        self.record.midway = False
        return self.record.kept or (None, None)

    @contextmanager
    def step(self, outcome: Callable[[], object], batch: object) -> Iterator[None]:
        """Around what Lightning does for an optimizer step; a commit that is opened in it ends with it."""
        assert self.record is not None
        self.record.offer(outcome, batch)
        with ExitStack() as stack:
            self._committing, self._opened = stack, False
            try:
                yield
            finally:
                self._committing = None
            if self._opened:
                self._undo.capture()  # before the commit ends: a rank may be cut at its very end, and stands at the new step then

    def open(self) -> None:
        """Gradients are ready: from here on only local updates."""
        if self._committing is None:
            raise UsageError("an optimizer stepped outside of training_step; step it in there, or use manual optimization")
        self._committing.enter_context(self.session.commit())
        self._opened = True

    def tentative(self, optimizer: Optimizer) -> None:
        """In manual optimization: an optimizer is about to step, to be committed when the batch is done."""
        self._undo.before_step(optimizer)
        self.session._engine.state.shared.prepare()  # the script may drop its gradients before the commit

    def accept(self, outcome: object, batch: object) -> None:
        """In manual optimization: a batch is done."""
        if self._undo.tentative and self.inside:
            assert self.record is not None
            self.record.offer(lambda: outcome, batch)
            with self.session.commit():
                self._undo.capture()

    def _enter(self) -> None:
        trainer: Any = self.trainer
        assert self.record is not None
        trainer.training = True
        trainer.lightning_module._current_fx_name = None
        validation = trainer.fit_loop.epoch_loop.val_loop
        if validation._data_fetcher is not None:
            validation._data_fetcher.teardown()
            validation._data_fetcher = None
        self._rejoin(self.record)
        self._undo.capture()
        if self._newcomer and self.record.midway:
            callbacks.show_epoch(trainer)
        self._newcomer = False
        torch.set_grad_enabled(True)

    def _rejoin(self, record: Record) -> None:
        """Go on with the training data where the record says."""
        data.rejoin(self.trainer, record.position, ready=record.ready if record.midway else 0)

    def _set_up_validation(self) -> None:
        """Lightning would do it when it first validates, with collectives that a replacement would miss."""
        trainer: Any = self.trainer
        validation = trainer.fit_loop.epoch_loop.val_loop
        if trainer.enable_validation and validation._combined_loader is None:
            trainer.validating = True
            validation.setup_data()
            trainer.training = True
