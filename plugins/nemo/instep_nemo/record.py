"""Private state of a rank under NeMo, beside Lightning's: NeMo's sampler, and its way to fetch several micro-batches in a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from instep_lightning.flavour import Foreign
from instep_lightning.record import Record
from instep_nemo.passes import Passes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.torch.effects import Effects
    from instep_lightning.undo import Undo

_FETCHED = ("fetched", "length", "done", "_batch_idx", "_dataloader_idx")
_SAMPLED = ("init_consumed_samples", "prev_consumed_samples", "if_first_step", "prev_global_batch_size", "init_global_step")
_OWN = ("lightning.", "nemo.", "instep_")
_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class NemoRecord(Record):
    """``fetched``: where the fetcher stood behind the step that the record is of.

    ``before``: in place of the batch of the step before that one, by whose size Lightning weighs what is logged.
    """

    def __init__(self, trainer: "Trainer", effects: "Effects", undo: "Undo", passes: Passes) -> None:
        super().__init__(trainer, effects, undo)
        self._wants = wants(trainer)
        self._passes = passes
        self.fetched: Mapping[str, Foreign] = {}
        self.before: Tensor | None = None

    def state_dict(self) -> dict[str, object]:
        """Lightning's, with NeMo's beside it."""
        fetcher: Foreign = self._trainer.fit_loop._data_fetcher
        if self._offered is not None and self._wants and self._keeping is None:
            self._offered = (self._offered[0], fetcher._batch)
        fetched = {key: getattr(fetcher, key) for key in _FETCHED} | {"samples": _samples(fetcher._batch)}
        fetched["before"] = _samples(self._trainer.fit_loop.epoch_loop._results.batch)
        return {**super().state_dict(), "fetched": fetched, "sampled": self._sampled(), "passes": self._passes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Foreign], /) -> None:
        """Both set back."""
        super().load_state_dict(state)
        self.fetched = state["fetched"]
        self._passes.load_state_dict(state["passes"])
        for key, value in state["sampled"].items():
            setattr(self._sampler(), key, value)

    def rejoin(self) -> None:
        """The fetcher stands behind the micro-batches of the last step, of which it knows the last one."""
        fetcher: Foreign = self._trainer.fit_loop._data_fetcher
        for key in _FETCHED:
            setattr(fetcher, key, self.fetched[key])
        _, batch = self.kept or (None, None)
        fetcher._batch = batch if batch is not None else _like(self.fetched["samples"])
        self.before = _like(self.fetched["before"])

    def _sampler(self) -> Foreign:
        return self._trainer.strategy.data_sampler

    def _sampled(self) -> dict[str, object]:
        sampler = self._sampler()
        return {key: _number(getattr(sampler, key)) for key in _SAMPLED if hasattr(sampler, key)}


def wants(trainer: "Trainer") -> bool:
    """Whether a hook of the script's own looks at batches. NeMo's and Lightning's do not."""
    module: Foreign = trainer.lightning_module
    hooks = [getattr(type(owner), name, None) for owner in (module, *trainer.callbacks) for name in _HOOKS]
    return any(not str(getattr(hook, "__module__", _OWN[0])).startswith(_OWN) for hook in hooks)


def _number(value: Foreign) -> Foreign:
    return value.item() if isinstance(value, Tensor) else value


def _samples(batch: Foreign) -> int | None:
    """Samples in a batch, as Lightning counts them."""
    if batch is None:
        return None
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))


def _like(samples: int | None) -> Tensor | None:
    """In place of a batch of which the number of samples alone is asked for."""
    return None if samples is None else torch.empty(samples, 0)
