"""The rest of a batch, in NeMo's flavour of Lightning's training loop: a step fetches its micro-batches itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from instep_lightning.adopt import members
from instep_lightning.flavour import Foreign, part
from instep_lightning.loops import LOOPS

if TYPE_CHECKING:
    from instep_nemo.fit import NemoFit

AUTOMATIC = "fit_loop.epoch_loop.automatic_optimization"


class NemoEpoch:
    """``fit_loop.epoch_loop``."""

    _instep: "NemoFit"

    def _instep_rest(self: Foreign) -> None:
        """What Lightning's ``advance`` does behind the optimizer step, for a step that has fetched by itself."""
        trainer, call = self.trainer, part(self.trainer, "trainer.call")
        fetcher = trainer.fit_loop._data_fetcher
        outcome, _ = self._instep.resumed()
        self._results.batch = self._instep.record.before
        self._instep.log_update()
        self.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        batch, index = fetcher._batch, fetcher._batch_idx
        self.batch_progress.is_last_batch = fetcher.done
        call._call_callback_hooks(trainer, "on_train_batch_end", outcome, batch, index)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outcome, batch, index)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()


NEMO_LOOPS: Mapping[str, Mapping[str, object]] = {
    **LOOPS,
    "fit_loop.epoch_loop": {**LOOPS["fit_loop.epoch_loop"], **members(NemoEpoch)},
}
"""Lightning's, with NeMo's flavour. NeMo puts a loop of its own for automatic optimization into place in set-up: see ``fit``."""
