"""Where passes of Megatron's random samplers begin: such a sampler moves ``consumed_samples`` with each batch that is drawn of it.

What it draws follows from where its pass began, so that is kept for the present epoch of its loader, and set before a pass is drawn again.
The next pass begins where the sampler stands by then, and its length is asked there too, so that is kept beside it. Validation begins
anew after a fault, from where its samplers stood when the step before it was committed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from instep_lightning.adopt import adopted, inherited
from instep_lightning.flavour import Foreign

_MOVES = ("MegatronPretrainingRandomSampler", "MegatronPretrainingRandomBatchSampler")


class Passes:
    """The loaders whose samplers move. ``first``: samples consumed before the training, by whoever trained this model so far."""

    def __init__(self, loaders: Iterable[Foreign], validation: Iterable[Foreign], first: int) -> None:
        self._loaders = [loader for loader in loaders if _moves(loader)]
        self._validation = [loader for loader in validation if _moves(loader)]
        self._starts = [(0, first) for _ in self._loaders]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the training runs, a pass that is drawn again begins where it began."""
        with ExitStack() as stack:
            for index, loader in enumerate(self._loaders):
                stack.enter_context(adopted(loader.batch_sampler, {"__iter__": _iterate, "_instep_index": index}, self))
            yield

    def state_dict(self) -> dict[str, object]:
        """For each training loader an epoch and where it began, and where all samplers stand."""
        consumed = [int(sampler.consumed_samples) for sampler in self._samplers()]
        return {"starts": [list(start) for start in self._starts], "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Foreign]) -> None:
        """Take them over."""
        self._starts = [(epoch, start) for epoch, start in state["starts"]]
        for sampler, consumed in zip(self._samplers(), state["consumed"], strict=True):
            sampler.consumed_samples = consumed

    def begin(self, index: int) -> None:
        """A pass is about to be drawn: one of the epoch that its loader is in."""
        loader = self._loaders[index]
        epoch, start = self._starts[index]
        if loader.epoch != epoch:
            self._starts[index] = (loader.epoch, int(loader.batch_sampler.consumed_samples))
        else:
            loader.batch_sampler.consumed_samples = start

    def _samplers(self) -> list[Foreign]:
        return [loader.batch_sampler for loader in (*self._loaders, *self._validation)]


def _moves(loader: Foreign) -> bool:
    return type(getattr(loader, "batch_sampler", None)).__name__ in _MOVES


def _iterate(sampler: Foreign) -> Iterator[object]:
    sampler._instep.begin(sampler._instep_index)
    steps: Iterator[object] = inherited(sampler).__iter__()
    return steps
