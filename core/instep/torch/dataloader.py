"""The cursor of torch's map-style ``DataLoader``: (epoch, batches delivered) and the seeds that order and transforms follow from."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.errors import UsageError
from instep.torch.passes import PassCursor, adopt_class, release_class
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
        self._loader, self._class = loader, type(loader)
        self._generators = _generators(loader)
        self._epoch = 0
        self.base_seed = self.order_seed = 0
        self._sampler_epoch: int | None = None
        self._at_start: list[torch.Tensor] = []
        self._order = Order(loader._index_sampler, self, workers=loader.num_workers > 0)
        adopt_class(
            loader,
            self,
            epoch=property(lambda _: self.epoch, lambda _, value: setattr(self, "epoch", value)),
            _index_sampler=property(lambda _: self._order),
        )

    @property
    def epoch(self) -> int:
        """Number of the present epoch, or of the next one between epochs."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._rewound(started=False)
        self._epoch, self._delivered = value, 0

    def state(self) -> Mapping[str, object]:
        """The position after the batches delivered so far."""
        return {
            "epoch": self._epoch,
            "started": self._started,
            "delivered": self._delivered,
            "base_seed": self.base_seed,
            "sampler_epoch": self._sampler_epoch,
            "generators": self._at_start if self._started else [g.get_state() for g in self._generators],
        }

    def load(self, state: object) -> None:
        """Return to a recorded position; the next batch is the one that follows it."""
        tree = cast(Mapping[str, object], state)
        self._rewound(started=bool(tree["started"]))
        self._epoch, self._delivered = cast(int, tree["epoch"]), cast(int, tree["delivered"])
        self._seed(cast(int, tree["base_seed"]))
        self._sampler_epoch = cast(int | None, tree["sampler_epoch"])
        self._at_start = list(cast(list[torch.Tensor], tree["generators"]))
        self._reset_generators()

    def release(self) -> None:
        """Give the loader its own class back."""
        self._rewound(started=False)
        release_class(self._loader)

    def _finish(self) -> None:
        super()._finish()
        self._epoch += 1

    def _start(self) -> None:
        draw = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self._seed(int(draw.item()))
        self._sampler_epoch = _sampler_epoch(self._loader)
        self._at_start = [generator.get_state() for generator in self._generators]

    def _open(self) -> Iterator[object]:
        self._reset_generators()
        sampler = self._loader.sampler
        if self._sampler_epoch is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._sampler_epoch)
        # torch draws a base seed from the loader's generator whenever it makes an iterator; a resumed epoch must not draw again
        own, self._loader.generator = self._loader.generator, torch.Generator().manual_seed(self.base_seed)
        try:
            return self._class.__iter__(self._loader)
        finally:
            self._loader.generator = own

    def _drop(self) -> None:
        if self._inner is None:
            self._inner = self._loader._iterator
        super()._drop()
        self._loader._iterator = None

    def _keeps_workers(self) -> bool:
        return self._loader.persistent_workers

    def _seed(self, base: int) -> None:
        self.base_seed, self.order_seed = base, mix(base, -1)

    def _reset_generators(self) -> None:
        for generator, state in zip(self._generators, self._at_start, strict=True):
            generator.set_state(state)


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
