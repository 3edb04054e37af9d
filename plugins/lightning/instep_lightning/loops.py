"""Lightning's loops, re-entered behind an optimizer step. They stay Lightning's own: what is overridden here hands on to them.

The block is the loop over epochs; its set-up and its end stand outside, once in each process. When the block is entered midway, the loops
begin with the rest of the batch whose step was committed last, and go on as ever.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from instep_lightning.adopt import inherited, members
from instep_lightning.flavour import Foreign, part

if TYPE_CHECKING:
    from instep_lightning.fit import Fit


class RecoverableFit:
    """``fit_loop``."""

    _instep: "Fit"

    def run(self: Foreign) -> None:
        """Set up, train in a block, end."""
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        fit = self._instep
        fit.prepare()
        fit.inside = True
        try:
            fit.session.recoverable(fit.block(inherited(self).run))()
        finally:
            fit.inside = False
        self.on_run_end()

    @property
    def skip(self: Foreign) -> bool:
        """Decided before the block."""
        return not self._instep.inside and bool(inherited(self).skip)

    @property
    def done(self: Foreign) -> bool:
        """Not before the rest of a batch is done."""
        return not self._instep.midway and bool(inherited(self).done)

    def setup_data(self: Foreign) -> None:
        """Before the block only."""
        if not self._instep.inside:
            inherited(self).setup_data()

    def reset(self: Foreign) -> None:
        """Before the block only."""
        if not self._instep.inside:
            inherited(self).reset()

    def on_run_start(self: Foreign) -> None:
        """Before the block only."""
        if not self._instep.inside:
            inherited(self).on_run_start()

    def on_run_end(self: Foreign) -> None:
        """Behind the block only."""
        if not self._instep.inside:
            inherited(self).on_run_end()

    def on_advance_start(self: Foreign) -> None:
        """The epoch has begun when the block is entered midway."""
        if not self._instep.midway:
            inherited(self).on_advance_start()


class RecoverableEpoch:
    """``fit_loop.epoch_loop``."""

    _instep: "Fit"

    @property
    def done(self: Foreign) -> bool:
        """Not before the rest of a batch is done."""
        return not self._instep.midway and bool(inherited(self).done)

    def reset(self: Foreign) -> None:
        """Counters were set when the epoch began."""
        if not self._instep.midway:
            inherited(self).reset()

    def on_run_start(self: Foreign, data_fetcher: Foreign) -> None:
        """The iterator stands where it is."""
        if not self._instep.midway:
            inherited(self).on_run_start(data_fetcher)
            return
        data_fetcher._start_profiler, data_fetcher._stop_profiler = self._on_before_fetch, self._on_after_fetch

    def advance(self: Foreign, data_fetcher: Foreign) -> None:
        """The rest of a batch, or a whole one."""
        if self._instep.midway:
            self._instep_rest()
        else:
            inherited(self).advance(data_fetcher)

    def _instep_rest(self: Foreign) -> None:
        """What Lightning's ``advance`` does behind the optimizer step."""
        trainer, call = self.trainer, part(self.trainer, "trainer.call")
        outcome, batch = self._instep.resumed()
        if trainer.lightning_module.automatic_optimization:
            self.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        self._results.batch = batch
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call._call_callback_hooks(trainer, "on_train_batch_end", outcome, batch, self.batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outcome, batch, self.batch_idx)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()


class RecoverableAutomatic:
    """``fit_loop.epoch_loop.automatic_optimization``: the commit lasts until the module's ``optimizer_step`` hook has ended."""

    _instep: "Fit"
    _instep_batch: object = None

    def run(self: Foreign, optimizer: object, batch_idx: int, kwargs: Mapping[str, object]) -> Foreign:
        """Remember the batch."""
        self._instep_batch = kwargs.get("batch")
        try:
            return inherited(self).run(optimizer, batch_idx, kwargs)
        finally:
            self._instep_batch = None

    def _optimizer_step(self: Foreign, batch_idx: int, train_step_and_backward_closure: Foreign) -> None:
        closure = train_step_and_backward_closure
        with self._instep.step(lambda: {} if closure._result.loss is None else closure._result.asdict(), self._instep_batch):
            inherited(self)._optimizer_step(batch_idx, closure)


class RecoverableManual:
    """``fit_loop.epoch_loop.manual_optimization``: the commit stands behind ``training_step``."""

    _instep: "Fit"

    def run(self: Foreign, kwargs: Mapping[str, object]) -> Foreign:
        """Run the step, and commit what its optimizers did."""
        batch = kwargs.get("batch")
        outcome = inherited(self).run(kwargs)
        self._instep.accept(outcome, batch)
        return outcome


class Notified:
    """``_signal_connector``: Lightning's handler of SIGTERM talks to all ranks wherever it strikes; `instep run` tells each rank itself."""

    def _sigterm_notifier_fn(self: Foreign, *_: object) -> None:
        self.received_sigterm = True


LOOPS: Mapping[str, Mapping[str, object]] = {
    "_signal_connector": members(Notified),
    "fit_loop": members(RecoverableFit),
    "fit_loop.epoch_loop": members(RecoverableEpoch),
    "fit_loop.epoch_loop.automatic_optimization": members(RecoverableAutomatic),
    "fit_loop.epoch_loop.manual_optimization": members(RecoverableManual),
}
"""What each loop of a trainer gets, and its handler of signals, by their paths."""
