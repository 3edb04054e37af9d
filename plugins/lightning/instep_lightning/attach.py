"""The one place where Lightning is changed: ``Trainer._run``, so that a training with the callback begins and ends here.

No hook of a callback comes early enough: loggers open their files before any. Trainers without the callback run as ever, and ``detach``
gives Lightning its own function back. All else that recovery needs is done to the objects of one trainer, while its training runs: they
get a subclass of their own class, and that class back at the end.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from instep_lightning.flavour import NAMES, part

_ORIGINAL = "_instep_original"


def attach(kind: type) -> None:
    """Let every training of a trainer with a callback of class ``kind`` begin in its ``around``. Does nothing the second time."""
    for trainer in _trainers():
        original = trainer._run
        if not hasattr(original, _ORIGINAL):
            trainer._run = _around(original, kind)


def detach() -> None:
    """Give Lightning its own function back."""
    for trainer in _trainers():
        with suppress(AttributeError):
            trainer._run = getattr(trainer._run, _ORIGINAL)


def _around(original: Callable[..., object], kind: type) -> Callable[..., object]:
    @functools.wraps(original)
    def run(trainer: Any, *args: object, **kwargs: object) -> object:
        call = functools.partial(original, trainer, *args, **kwargs)
        mine = next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)
        fitting = part(trainer, "trainer.states").TrainerFn.FITTING
        if mine is None:
            return call()
        return mine.around(trainer, call, fitting=trainer.state.fn == fitting)  # type: ignore[attr-defined]

    setattr(run, _ORIGINAL, original)
    return run


def _trainers() -> list[Any]:
    return [sys.modules[name].Trainer for name in NAMES if hasattr(sys.modules.get(name), "Trainer")]
