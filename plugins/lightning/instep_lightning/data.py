"""The training data: its loaders are private state with a cursor each, and Lightning's iterators over them are made again after a fault."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, SequentialSampler

from instep import codec
from instep.errors import UsageError
from instep.torch.dataloader import DataLoaderCursor
from instep.torch.passes import cursor_of
from instep.torch.sampling import unmoved
from instep_lightning.flavour import Foreign, fabric

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def loaders(trainer: "Trainer") -> dict[str, object]:
    """All loaders of the training data by name. Raises ``UsageError`` for one that has no position to return to."""
    found = _combined(trainer).flattened
    for loader in found:
        if not isinstance(loader, DataLoader) and not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise UsageError(
                f"training data in a {type(loader).__qualname__} has no position to return to; use a DataLoader, or a loader with "
                "state_dict and load_state_dict such as torchdata's StatefulDataLoader"
            )
        if hasattr(loader, "state_dict") and _hidden(loader):
            raise UsageError(
                f"Lightning spreads the random order of a {type(loader).__qualname__} over ranks by a sampler that is no part of its "
                "state; give it sampler=DistributedSampler(data, ranks, rank), or use a DataLoader"
            )
    return {f"loader{i}": loader for i, loader in enumerate(found)}


def positions(trainer: "Trainer") -> list[Foreign]:
    """Where loaders stand that tell it themselves, in a training that goes on from a checkpoint: before they are protected."""
    return list(_combined(trainer)._state_dicts()) if trainer.fit_loop.restarting else []


def cursors(trainer: "Trainer") -> list[object]:
    """Where the cursors of all loaders stand, before ``begin``; ``None`` for a loader that tells its position itself."""
    found = [_cursor(loader) for loader in _combined(trainer).flattened]
    return [codec.decode(codec.encode(cursor.state())) if isinstance(cursor, DataLoaderCursor) else None for cursor in found]


def begin(trainer: "Trainer", positions: Sequence[Foreign] = ()) -> None:
    """Lightning has made its iterator before the loaders were protected: make it again, without any further draw."""
    if positions:
        _combined(trainer)._load_state_dicts(positions)
    _tell_epoch(trainer)
    with unmoved():
        iter(trainer.fit_loop._data_fetcher)


def again(trainer: "Trainer", before: Sequence[object]) -> None:
    """Begin as in a new process that has loaded a checkpoint; ``before`` is what ``cursors`` told in this one."""
    for loader, state in zip(_combined(trainer).flattened, before, strict=True):
        cursor = _cursor(loader)
        if state is None:
            cursor._rewound(started=False)
        else:
            cursor.load(deepcopy(state))
    with unmoved():
        trainer.fit_loop._load_combined_loader_states()
    begin(trainer)


def position(trainer: "Trainer") -> dict[str, object]:
    """Where Lightning's iterator stands; the loaders' own positions are in their cursors."""
    iterator = _combined(trainer)._iterator
    return {"index": getattr(iterator, "_idx", 0), "consumed": list(getattr(iterator, "_consumed", ()))}


def rejoin(trainer: "Trainer", where: Mapping[str, Foreign], *, ready: int) -> None:
    """Go on with the pass that the loaders stand in, ``ready`` batches of which the loop has taken."""
    combined, fetcher = _combined(trainer), trainer.fit_loop._data_fetcher
    assert fetcher is not None
    _tell_epoch(trainer)
    iterator: Any = type(combined._iterator)(combined.flattened, combined._limits)
    iterator.iterators = [cursor_of(loader).again() for loader in combined.flattened]
    iterator._idx = where.get("index", 0)
    if hasattr(iterator, "_consumed"):
        iterator._consumed = list(where.get("consumed", ())) or [False] * len(iterator.iterators)
    combined._iterator = iterator
    fetcher.iterator = combined  # as Lightning's own `iter(fetcher)` leaves it
    fetcher.reset()
    fetcher.fetched = ready
    if fetcher.length is not None and ready:
        fetcher.done = ready >= fetcher.length


def _tell_epoch(trainer: "Trainer") -> None:
    """Samplers learn the epoch as it begins; a replacement enters in the middle of one."""
    tell = fabric(trainer, "utilities.data")._set_sampler_epoch
    for loader in _combined(trainer).flattened:
        tell(loader, trainer.fit_loop.epoch_progress.current.processed)


def _hidden(loader: Foreign) -> bool:
    """Whether the order follows from draws that nobody could repeat: Lightning's wrapper takes all of a sampler when a pass begins."""
    sampler: Foreign = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if type(sampler).__name__ != "DistributedSamplerWrapper":
        return False
    return not isinstance(getattr(sampler.dataset, "_sampler", None), SequentialSampler)


def _cursor(loader: object) -> Foreign:
    return cursor_of(loader)


def _combined(trainer: "Trainer") -> Foreign:
    return trainer.fit_loop._combined_loader
