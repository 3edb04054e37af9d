"""State of callbacks: what they tell in ``state_dict``, and for Lightning's ModelCheckpoint all that decides what it saves next."""

import os
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

from instep_lightning.flavour import Foreign, own, part

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

_VALUES = ("current_score", "best_model_score", "kth_value", "_last_global_step_saved", "_defer_save_until_validation")
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path", "_last_checkpoint_saved")
_WITHOUT_BATCH = "on_train_batch_end"


def dump(trainer: "Trainer") -> dict[str, object]:
    """The state of each callback that has any, by its place and class."""
    return {
        _key(i, c): state for i, c in enumerate(trainer.callbacks) if (state := _checkpoint(c) if _saves(trainer, c) else c.state_dict())
    }


def load(trainer: "Trainer", tree: Mapping[str, Foreign]) -> None:
    """Give each callback its state back."""
    for i, callback in enumerate(trainer.callbacks):
        state = tree.get(_key(i, callback))
        if state is None:
            continue
        if _saves(trainer, callback):
            _restore_checkpoint(callback, state)
        else:
            callback.load_state_dict(deepcopy(state))


def want_batch(trainer: "Trainer") -> bool:
    """Whether somebody beside Lightning looks at a batch and what came of it once its step is done."""
    module = trainer.lightning_module
    if not own(trainer, type(module).on_train_batch_end):
        return True
    return any(
        _WITHOUT_BATCH in vars(callback) or not own(trainer, type(callback).on_train_batch_end)
        for callback in trainer.callbacks
        if not type(callback).__module__.startswith("instep_lightning.")
    )


def show_epoch(trainer: "Trainer") -> None:
    """On a replacement in the middle of an epoch: its progress bar has not seen the epoch begin."""
    for callback in trainer.callbacks:
        if isinstance(callback, part(trainer, "callbacks").ProgressBar):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _key(index: int, callback: "Callback") -> str:
    return f"{index}.{type(callback).__qualname__}"


def _saves(trainer: "Trainer", callback: object) -> bool:
    return isinstance(callback, part(trainer, "callbacks").ModelCheckpoint)


def _checkpoint(callback: Foreign) -> dict[str, object]:
    """Paths are told relative to the callback's own folder, so that two runs with different folders have equal state."""
    state: dict[str, object] = {key: getattr(callback, key) for key in _VALUES if hasattr(callback, key)}
    state |= {key: _below(callback, getattr(callback, key)) for key in _PATHS if hasattr(callback, key)}
    return {**state, "best_k_models": {_below(callback, path): score for path, score in callback.best_k_models.items()}}


def _restore_checkpoint(callback: Foreign, state: Mapping[str, Foreign]) -> None:
    for key in _VALUES:
        if key in state:
            setattr(callback, key, state[key])
    for key in _PATHS:
        if key in state:
            setattr(callback, key, _whole(callback, state[key]))
    callback.best_k_models = {_whole(callback, path): score for path, score in state["best_k_models"].items()}


def _below(callback: Foreign, path: str) -> str:
    return os.path.relpath(path, callback.dirpath) if path and callback.dirpath else path


def _whole(callback: Foreign, path: str) -> str:
    return os.path.join(callback.dirpath, path) if path and callback.dirpath else path
