"""Private state of a rank under Lightning: where its loops stand, what was logged and counted since, what callbacks and module keep."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from instep import codec
from instep.errors import UsageError
from instep_lightning import attributes, callbacks, data, progress, results
from instep_lightning.flavour import Foreign

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.torch.effects import Effects
    from instep_lightning.undo import Undo

_CONNECTOR = ("_first_loop_iter", "_current_fx", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_ROOM, _BATCH_ROOM = 64 << 10, 1 << 20
"""Bytes that are reserved in each slot of the record, which cannot grow: for what is logged later, and for a batch if one is kept."""


class Record:
    """Recorded at each commit, before its body. ``midway``: recorded behind an optimizer step, not at the start of the training.

    ``kept``: what came of the batch and the batch, for hooks that look at them.
    """

    def __init__(self, trainer: "Trainer", effects: "Effects", undo: "Undo") -> None:
        self._trainer, self._effects, self._undo = trainer, effects, undo
        self._wants = callbacks.want_batch(trainer)
        self._offered: tuple[Callable[[], object], object] | None = None
        self._keeping: list[object] | None = None
        self.midway = False
        self.kept: tuple[object, object] | None = None
        self.position: Mapping[str, Any] = {}

    @property
    def ready(self) -> int:
        """Batches of the epoch that the training loop has taken."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def offer(self, outcome: Callable[[], object], batch: object) -> None:
        """A step is about to be committed."""
        self._offered, self._keeping = (outcome, batch if self._wants else None), None

    def state_dict(self) -> dict[str, object]:
        """Everything, as the codec knows it."""
        trainer: Any = self._trainer
        midway = self._offered is not None
        state = {
            "midway": midway,
            "progress": progress.dump(trainer),
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "connector": {key: getattr(trainer._logger_connector, key) for key in _CONNECTOR},
            "training": results.dump(trainer.fit_loop.epoch_loop._results),
            "validation": results.dump(trainer.fit_loop.epoch_loop.val_loop._results),
            "metrics": results.dump_metrics(trainer),
            "callbacks": callbacks.dump(trainer),
            "attributes": attributes.dump(trainer),
            "position": data.position(trainer),
            "effects": self._effects.position,
            "kept": self._keep() if midway and self._wants else None,
        }
        if not midway:  # the first of all states, by which the record is measured
            state["room"] = bytes(_BATCH_ROOM if self._wants else _ROOM)
        return state

    def load_state_dict(self, state: Mapping[str, Foreign], /) -> None:
        """Set everything back, on a survivor as on a replacement."""
        trainer: Any = self._trainer
        self.midway, self.position = state["midway"], state["position"]
        self.kept = None if state["kept"] is None else self._on_device(state["kept"])
        outcome, batch = self.kept or (None, None)
        self._offered, self._keeping = ((lambda: outcome, batch) if self.midway else None), state["kept"]
        progress.load(trainer, state["progress"])
        trainer.should_stop, trainer.accumulate_grad_batches = state["should_stop"], state["accumulate"]
        for key, value in state["connector"].items():
            setattr(trainer._logger_connector, key, value)
        results.load(trainer, trainer.fit_loop.epoch_loop._results, state["training"])
        results.load(trainer, trainer.fit_loop.epoch_loop.val_loop._results, state["validation"])
        results.load_metrics(trainer, state["metrics"])
        callbacks.load(trainer, state["callbacks"])
        attributes.load(trainer, state["attributes"])
        self._effects.position = state["effects"]
        self._undo.capture()  # shared state has been restored by now, if there was any to restore

    def undo_step(self) -> None:
        """See ``instep.torch.reset.Undoing``."""
        self._undo.back()

    def _keep(self) -> list[object]:
        """Lightning gives the outcome away once the step is done, so it is asked for once."""
        assert self._offered is not None
        if self._keeping is None:
            outcome, batch = self._offered
            self._keeping = cast(list[object], _plain([outcome(), batch]))
            size = len(codec.encode(self._keeping, where="the batch and what training_step returned, for on_train_batch_end"))
            if size > _BATCH_ROOM:
                raise UsageError(
                    f"on_train_batch_end looks at its batch, and that is {size} bytes with what training_step returned: too much to record "
                    f"at each step (at most {_BATCH_ROOM}). Return less, or move the work to a hook without a batch (on_before_zero_grad)"
                )
        return self._keeping

    def _on_device(self, kept: list[object]) -> tuple[object, object]:
        outcome, batch = cast(list[object], self._trainer.strategy.batch_to_device(kept))
        return outcome, batch


def _plain(tree: object) -> object:
    """Without graphs."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return type(tree)(_plain(value) for value in tree) if type(tree) in (list, tuple) else tree  # type: ignore[call-arg, attr-defined]
