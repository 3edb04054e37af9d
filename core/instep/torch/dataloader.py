"""The cursor of torch's map-style ``DataLoader``: (epoch, batches delivered) and the seeds that order and transforms follow from."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.errors import UsageError
from instep.torch.passes import PassCursor, adopt_class, cursor_of, release_class
from instep.torch.sampling import Order, mix


class DataLoaderCursor(PassCursor):
    """Position in a map-style ``DataLoader``, whose class is swapped for one that asks this cursor for its order.

    The loader gains ``epoch`` (settable), which advances once an epoch was delivered completely. An epoch draws one number from the
    global torch generator, or from the loader's own: its base seed, from which everything else follows.
    """

    def __init__(self, name: str, loader: DataLoader[object], on_delivery: Callable[[], None]) -> None:
        """Adopt ``loader``. Raises ``UsageError`` when it has no position to return to."""
        super().__init__(name, on_delivery)
        _check(name, loader)
        self._owner, self._class = weakref.ref(loader), type(loader)
        self._generators = _generators(loader)
        self._epoch = 0
        self._sampler_epoch: int | None = None
        self._at_start: list[torch.Tensor] = []
        self._order = Order(loader._index_sampler, self._position, workers=loader.num_workers > 0)
        adopt_class(name, loader, self, epoch=property(_epoch, _set_epoch), _index_sampler=property(_order))

    @property
    def epoch(self) -> int:
        """Number of the present epoch, or of the next one between epochs."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._rewound(started=False)
        self._epoch, self._position.delivered = value, 0

    @property
    def order(self) -> Order:
        """Stands in for the loader's sampler."""
        return self._order

    def state(self) -> Mapping[str, object]:
        """The position after the batches delivered so far."""
        return {
            "epoch": self._epoch,
            "started": self._started,
            "delivered": self._position.delivered,
            "base_seed": self._position.base_seed,
            "sampler_epoch": self._sampler_epoch,
            "generators": self._at_start if self._started else [g.get_state() for g in self._generators],
        }

    def load(self, state: object) -> None:
        """Return to a recorded position; the next batch is the one that follows it."""
        tree = cast(Mapping[str, object], state)
        self._rewound(started=bool(tree["started"]))
        self._epoch, self._position.delivered = cast(int, tree["epoch"]), cast(int, tree["delivered"])
        self._seed(cast(int, tree["base_seed"]))
        self._sampler_epoch = cast(int | None, tree["sampler_epoch"])
        self._at_start = list(cast(list[torch.Tensor], tree["generators"]))
        self._reset_generators()

    def release(self) -> None:
        """Give the loader its own class back."""
        self._rewound(started=False)
        release_class(self._loader())

    def _finish(self) -> None:
        super()._finish()
        self._epoch += 1

    def _start(self) -> None:
        loader = self._loader()
        draw = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._seed(int(draw.item()))
        self._sampler_epoch = _sampler_epoch(loader)
        self._at_start = [generator.get_state() for generator in self._generators]

    def _open(self) -> Iterator[object]:
        self._reset_generators()
        loader = self._loader()
        if self._sampler_epoch is not None and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(self._sampler_epoch)
        # torch draws a base seed from the loader's generator whenever it makes an iterator; a resumed epoch must not draw again
        own, loader.generator = loader.generator, torch.Generator().manual_seed(self._position.base_seed)
        try:
            return self._class.__iter__(loader)
        finally:
            loader.generator = own

    def _drop(self) -> None:
        loader = self._owner()
        if loader is not None:
            if self._inner is None:
                self._inner = loader._iterator
            loader._iterator = None
        super()._drop()

    def _keeps_workers(self) -> bool:
        loader = self._owner()
        return loader is not None and loader.persistent_workers

    def _loader(self) -> DataLoader[object]:
        loader = self._owner()
        if loader is None:
            raise UsageError(f"loader {self._name!r} is used through an iterator although it was dropped; keep the loader")
        return loader

    def _seed(self, base: int) -> None:
        self._position.base_seed, self._position.order_seed = base, mix(base, -1)

    def _reset_generators(self) -> None:
        for generator, state in zip(self._generators, self._at_start, strict=True):
            generator.set_state(state)


def _epoch(loader: DataLoader[object]) -> int:
    return cast(DataLoaderCursor, cursor_of(loader)).epoch


def _set_epoch(loader: DataLoader[object], value: int) -> None:
    cast(DataLoaderCursor, cursor_of(loader)).epoch = value


def _order(loader: DataLoader[object]) -> Order:
    return cast(DataLoaderCursor, cursor_of(loader)).order


def _check(name: str, loader: DataLoader[object]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"session.protect({name}=...): a DataLoader over an IterableDataset has no position to return to; "
            "use torchdata's StatefulDataLoader, or a map-style dataset"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"session.protect({name}=...): {type(loader).__name__} overrides __iter__, so its position is unknown; "
            "give it state_dict() and load_state_dict()"
        )
    if not getattr(loader, "in_order", True):
        raise UsageError(f"session.protect({name}=...): in_order=False delivers batches in another order each time; leave it at True")


def _generators(loader: DataLoader[object]) -> list[torch.Generator]:
    """The explicit generators that the order may draw from, each once."""
    owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _sampler_epoch(loader: DataLoader[object]) -> int | None:
    epoch = getattr(loader.sampler, "epoch", None)
    return epoch if isinstance(epoch, int) else None
