"""Adoption of loaders and generators by ``session.protect``: private by type, each with a cursor that the record keeps.

A loader is a map-style ``DataLoader``, or any iterable with ``state_dict`` and ``load_state_dict`` that is not a module.
"""

import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep.errors import UsageError
from instep.torch.dataloader import DataLoaderCursor
from instep.torch.passes import PassCursor, adopt_class, is_adopted, release_class
from instep.torch.sampling import unmoved


class Cursor(Protocol):
    """A position in a stream of batches or random numbers."""

    @property
    def delivered(self) -> int:
        """Batches of the present pass that the script has; 0 for generators."""

    def state(self) -> object:
        """The position, as the codec can hold it: cheap, and of a size that hardly changes."""

    def load(self, state: object) -> None:
        """Return to a recorded position."""

    def quiesce(self) -> None:
        """Stop what runs ahead, without waiting for it. Main thread only."""

    def release(self) -> None:
        """Undo the adoption."""


class StatefulLoader(Protocol):
    """An iterable that can tell and take its position, like torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[object]:
        """A pass, from the position on."""

    def state_dict(self) -> Mapping[str, object]:
        """The position after the batches delivered."""

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Take a position over."""


def adopt(name: str, obj: object, *, on_delivery: Callable[[], None]) -> Cursor | None:
    """The cursor of a loader or generator, ``None`` for anything else.

    ``on_delivery`` is called before each batch is fetched and again before it is handed over; it may raise. Raises ``UsageError``
    for a loader that has no position to return to, or was adopted before.
    """
    if is_adopted(obj):
        raise UsageError(f"session.protect({name}=...): this loader is protected already")
    if isinstance(obj, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        return GeneratorCursor(obj)
    if isinstance(obj, nn.Module):
        return None
    if all(hasattr(obj, method) for method in ("state_dict", "load_state_dict", "__iter__")):
        return StatefulCursor(name, cast(StatefulLoader, obj), on_delivery)
    if isinstance(obj, DataLoader):
        return DataLoaderCursor(name, obj, on_delivery)
    return None


class StatefulCursor(PassCursor):
    """Position of a loader that tells it itself; its state is asked for only when a batch was delivered since."""

    def __init__(self, name: str, loader: StatefulLoader, on_delivery: Callable[[], None]) -> None:
        super().__init__(name, on_delivery)
        self._owner, self._class = weakref.ref(loader), type(loader)
        self._asked: tuple[int, int, bool] | None = None
        self._answer: Mapping[str, object] = {}
        self._unopened = False
        adopt_class(name, loader, self)

    def state(self) -> Mapping[str, object]:
        """The loader's own state, and whether a pass is under way."""
        now = (self._number, self.delivered, self._started)
        if self._asked != now:
            with unmoved():
                self._answer = self._loader().state_dict()
                if not self._started:
                    # StatefulDataLoader opens a pass to tell, in the order of the epoch that its sampler has now
                    self._loader().load_state_dict(self._answer)
            self._asked = now
        return {"started": self._started, "delivered": self.delivered, "loader": self._answer}

    def load(self, state: object) -> None:
        """Give the loader its state back."""
        tree = cast(Mapping[str, object], state)
        self._rewound(started=bool(tree["started"]))
        self._unopened = self._started
        self._position.delivered = cast(int, tree["delivered"])
        self._loader().load_state_dict(cast(Mapping[str, object], tree["loader"]))
        self._asked = None

    def release(self) -> None:
        """Give the loader its own class back."""
        self._rewound(started=False)
        release_class(self._loader())

    def _start(self) -> None:
        if self._unopened:
            self._open()  # the loader goes on with the pass that it was brought back to; only its next one is a new pass
        # moves the global generator once a pass, in place of the draws that are undone below
        torch.empty((), dtype=torch.int64).random_()

    def _open(self) -> Iterator[object]:
        self._unopened = False
        with unmoved():  # StatefulDataLoader draws seeds whenever it makes an iterator, resumed or not
            return self._class.__iter__(self._loader())

    def _loader(self) -> StatefulLoader:
        loader = self._owner()
        if loader is None:
            raise UsageError(f"loader {self._name!r} was dropped; keep it as long as the session")
        return loader


class GeneratorCursor:
    """State of an explicit random generator of torch, numpy or python."""

    delivered = 0

    def __init__(self, generator: torch.Generator | np.random.Generator | np.random.RandomState | random.Random) -> None:
        self._generator = generator

    def state(self) -> object:
        """The generator's state."""
        generator = self._generator
        if isinstance(generator, np.random.Generator):
            return dict(generator.bit_generator.state)
        if isinstance(generator, random.Random):
            version, words, gauss = generator.getstate()
            return version, np.array(words, dtype=np.uint32), gauss
        return generator.get_state()

    def load(self, state: object) -> None:
        """Set the generator to a recorded state."""
        generator = self._generator
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = cast(Mapping[str, object], state)
        elif isinstance(generator, random.Random):
            version, words, gauss = cast(tuple[int, "np.ndarray[tuple[int], np.dtype[np.uint32]]", float | None], state)
            generator.setstate((version, tuple(words.tolist()), gauss))
        elif isinstance(generator, torch.Generator):
            generator.set_state(cast(torch.Tensor, state))
        else:
            generator.set_state(cast(tuple[str, "np.ndarray[tuple[int], np.dtype[np.uint32]]", int, int, float], state))

    def quiesce(self) -> None:
        """Nothing runs ahead."""

    def release(self) -> None:
        """Nothing was changed."""
