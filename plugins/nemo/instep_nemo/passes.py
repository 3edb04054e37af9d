"""Where passes of Megatron's random samplers begin: such a sampler moves ``consumed_samples`` with each batch that is drawn of it.

What it draws follows from where its pass began, so that is kept for the present epoch of its loader, and set before a pass is drawn,
for the first time or again. A whole pass ends at a multiple of the samples that are dealt out in an epoch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from instep_lightning.adopt import adopted, inherited
from instep_lightning.flavour import Foreign

_MOVES = ("MegatronPretrainingRandomSampler", "MegatronPretrainingRandomBatchSampler")


class Passes:
    """The loaders whose samplers move. ``first``: samples consumed before the training, by whoever trained this model so far."""

    def __init__(self, loaders: Iterable[Foreign], first: int) -> None:
        self._loaders = [loader for loader in loaders if type(getattr(loader, "batch_sampler", None)).__name__ in _MOVES]
        self._starts = [(0, first) for _ in self._loaders]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the training runs, a pass that is drawn again begins where it began."""
        with ExitStack() as stack:
            for index, loader in enumerate(self._loaders):
                stack.enter_context(adopted(loader.batch_sampler, {"__iter__": _iterate, "_instep_index": index}, self))
            yield

    def starts(self) -> list[list[int]]:
        """For each loader, an epoch and where it began, as the record keeps them."""
        return [list(start) for start in self._starts]

    def load(self, starts: Sequence[Sequence[int]]) -> None:
        """Take them over."""
        self._starts = [(epoch, start) for epoch, start in starts]

    def begin(self, index: int) -> None:
        """A pass is about to be drawn: one of the epoch that its loader is in."""
        loader = self._loaders[index]
        epoch, start = self._starts[index]
        whole = loader.batch_sampler.total_samples - loader.batch_sampler.last_batch_size
        if loader.epoch != epoch:
            start = (start // whole + loader.epoch - epoch) * whole
            self._starts[index] = (loader.epoch, start)
        loader.batch_sampler.consumed_samples = start


def _iterate(sampler: Foreign) -> Iterator[object]:
    sampler._instep.begin(sampler._instep_index)
    steps: Iterator[object] = inherited(sampler).__iter__()
    return steps
