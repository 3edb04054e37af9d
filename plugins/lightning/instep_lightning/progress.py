"""Where Lightning's loops stand: their counters and flags, as trees that the codec knows, and back."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from instep_lightning.flavour import part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FLAGS = (
    "_batches_that_stepped",
    "_last_train_dl_reload_epoch",
    "_last_val_dl_reload_epoch",
    "_loaded_from_state_dict",
    "_restart_stage",
    "_restarting",
    "_resuming_from_checkpoint",
    "_has_run",
    "_skip_next_val",
    "max_batches",
)


def dump(trainer: "Trainer") -> dict[str, object]:
    """Every counter and flag of the loops of ``fit``, by the path of its loop."""
    return {path: _of(loop) for path, loop in _loops(trainer)}


def load(trainer: "Trainer", tree: dict[str, object]) -> None:
    """Set all of them as they were."""
    base = part(trainer, "loops.progress")._BaseProgress
    for path, loop in _loops(trainer):
        for name, value in cast(dict[str, Any], tree[path]).items():
            mine = vars(loop).get(name)
            if isinstance(mine, base):
                mine.load_state_dict(value)
            elif name == "_seen_batches_per_dataloader":
                mine.clear()
                mine.update(value)
            else:
                vars(loop)[name] = value


def _of(loop: Any) -> dict[str, object]:
    base = part(loop.trainer, "loops.progress")._BaseProgress
    out: dict[str, object] = {}
    for name, value in vars(loop).items():
        if isinstance(value, base):
            out[name] = value.state_dict()
        elif name in _FLAGS:
            out[name] = value
        elif name == "_seen_batches_per_dataloader":
            out[name] = dict(value)
    return out


def _loops(trainer: "Trainer") -> Iterator[tuple[str, Any]]:
    kind = part(trainer, "loops.loop")._Loop

    def below(path: str, loop: Any) -> Iterator[tuple[str, Any]]:
        yield path, loop
        for name, value in vars(loop).items():
            if isinstance(value, kind):
                yield from below(f"{path}.{name}", value)

    return below("fit_loop", trainer.fit_loop)
