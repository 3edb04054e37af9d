"""Plain attributes that a module or a callback of the script's own keeps: counters, lists that collect what steps returned.

Lightning has scripts collect in ``self.outputs = []``. What a cut step or validation has left in there must go, and a replacement must have
what was in there. Values are small and plain, or stay as they are: whatever else a script keeps is its own affair.
"""

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from instep_lightning.flavour import own, part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)
_ROOM, _OVERHEAD = 16 << 10, 16
"""Bytes of all attributes of one object, and what a value takes beside its content."""
_OTHERS = {"training"}
"""Kept with the module's own flags."""


def dump(trainer: "Trainer") -> dict[str, object]:
    """The plain attributes of each object, by its place and class."""
    return {key: _of(key, obj) for key, obj in _owners(trainer)}


def load(trainer: "Trainer", tree: Mapping[str, Mapping[str, object]]) -> None:
    """Set them back. Lists and dicts stay the same objects."""
    for key, obj in _owners(trainer):
        for name, value in tree.get(key, {}).items():
            mine = vars(obj).get(name)
            if isinstance(mine, list) and isinstance(value, list):
                mine[:] = value
            elif isinstance(mine, MutableMapping) and isinstance(value, Mapping):
                mine.clear()
                mine.update(value)
            else:
                vars(obj)[name] = value


def _owners(trainer: "Trainer") -> Iterator[tuple[str, object]]:
    yield "module", trainer.lightning_module
    base = part(trainer, "callbacks").Callback
    for index, callback in enumerate(trainer.callbacks):
        stateless = own(trainer, type(callback).state_dict)
        foreign = not (own(trainer, type(callback)) or type(callback).__module__.startswith("instep_lightning."))
        if stateless and foreign and isinstance(callback, base):
            yield f"{index}.{type(callback).__qualname__}", callback


def _of(key: str, obj: object) -> dict[str, object]:
    out: dict[str, object] = {}
    room = _ROOM
    for name, value in vars(obj).items():
        if name.startswith("_") or name in _OTHERS or (size := _size(value, room)) is None:
            continue
        if size > room:
            _warn(key, obj, name)
            continue
        room -= size
        out[name] = _detached(value)
    return out


def _size(value: Any, room: int) -> int | None:
    """Bytes of a plain value, or more than ``room`` if it has more; ``None`` for one that is not plain."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return _OVERHEAD
    if kind in (str, bytes):
        return _OVERHEAD + len(value)
    if kind in (Tensor, np.ndarray):
        return _OVERHEAD + int(value.nbytes)
    if kind not in (list, tuple, dict):
        return None
    total = _OVERHEAD
    for each in (pair for item in value.items() for pair in item) if isinstance(value, dict) else value:
        size = _size(each, room - total)
        if size is None:
            return None
        total += size
        if total > room:
            break
    return total


def _detached(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return type(value)(_detached(each) for each in value) if type(value) in (list, tuple) else value  # type: ignore[call-arg, attr-defined]


def _warn(key: str, obj: object, name: str) -> None:
    """Once for each attribute of an object."""
    warned = vars(obj).setdefault("_instep_warned", set())
    if name not in warned:
        warned.add(name)
        log.warning(
            "%s.%s (%s) has more than %d bytes, so it is not given to a replacement, nor set back after a fault: use a metric of "
            "torchmetrics, or a callback with state_dict that tells less", type(obj).__name__, name, key, _ROOM,
        )  # fmt: skip
