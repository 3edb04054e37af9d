"""Where batches come from: a map-style data set by order, or an iterable that tells its state. The same code in producer and trainer."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
import xxhash
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from instep import codec
from instep.torch.sampling import mix, seed_all
from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.order import At, Indices, Leg, Order

Collate = Callable[[object], object]


class Produced(NamedTuple):
    """One step of a source: the batch (``END`` behind an epoch's last), where the next one begins, and the state there, if it has one."""

    batch: object
    next: At
    state: bytes | None


END = object()


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can tell and take its position."""

    def state_dict(self) -> Mapping[str, object]:
        """The position."""

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Take a position over."""


class MapSource:
    """A map-style data set. Each sample's generators follow from (seed, epoch, index), whoever fetches it."""

    sequential = False

    def __init__(self, dataset: object, order: Order, collate: Collate, *, batched: bool, seed: int, seed_samples: bool) -> None:
        self.dataset, self.order, self.collate = dataset, order, collate
        self.batched, self.seed, self.seed_samples = batched, seed, seed_samples

    def fetch(self, leg: Leg) -> Produced:
        """One batch."""
        if leg.indices is None:
            return Produced(END, leg.next, None)
        with _in_worker(self.dataset):
            samples = self._samples(leg.at.epoch, leg.indices)
        return Produced(self.collate(samples if self.batched else samples[0]), leg.next, None)

    def _samples(self, epoch: int, indices: Indices) -> list[object]:
        epoch_seed = mix(mix(self.seed, 2), epoch)
        several = getattr(self.dataset, "__getitems__", None)
        if several is not None:
            self._seed(epoch_seed, indices[0] if indices else 0)
            return cast(list[object], several(indices))
        samples = []
        for index in indices:
            self._seed(epoch_seed, index)
            samples.append(self.dataset[index])  # type: ignore[index]
        return samples

    def _seed(self, epoch_seed: int, index: object) -> None:
        if self.seed_samples:
            seed_all(mix(epoch_seed, index if isinstance(index, int) else xxhash.xxh3_64_intdigest(repr(index).encode())))


class StreamSource:
    """An iterable of batches, in one pass after the other. ``stride`` is what one batch adds to the cursor.

    Without ``state_dict`` a place inside an epoch is reached by fetching and dropping what comes before it, with a warning.
    """

    sequential = True

    def __init__(self, source: Iterable[object], *, stride: int, seed: int) -> None:
        self.source, self.stride, self.seed = source, stride, seed
        self._at: At | None = None
        self._steps: Iterator[object] = iter(())

    def __getstate__(self) -> dict[str, object]:
        """Sent to the producer without the pass that may be under way here."""
        return {**vars(self), "_at": None, "_steps": iter(())}

    @property
    def name(self) -> str:
        """How messages name the source."""
        return type(getattr(self.source, "dataset", self.source)).__name__

    def fetch(self, at: At, state: bytes | None) -> Produced:
        """The batch at a place; ``state`` is the source's state there, if it is known."""
        if self._at != at:
            self._seek(at, state)
        self._at = None
        batch = self._step(at)
        following = At(at.epoch + 1, 0) if batch is END else At(at.epoch, at.sample + self.stride)
        told = codec.encode(self.source.state_dict(), where="state_dict()") if isinstance(self.source, Stateful) else None
        if batch is END:
            self._begin(following.epoch)
        self._at = following
        return Produced(batch, following, told)

    def _seek(self, at: At, state: bytes | None) -> None:
        if isinstance(self.source, Stateful) and state is not None:
            self.source.load_state_dict(cast(Mapping[str, object], codec.decode(state)))
            self._begin(at.epoch)
            if at.sample == 0:
                self._enter_anew(at.epoch)
            return
        self._begin(at.epoch)
        if at.sample:
            warnings.warn(f"{self.name} has no state_dict(): batches up to sample {at.sample} are fetched and dropped", stacklevel=2)
            for sample in range(0, at.sample, self.stride):
                self._step(At(at.epoch, sample))

    def _step(self, at: At) -> object:
        """The next batch; the source's draws follow from its place, so that they are the same after a seek."""
        seed_all(mix(mix(mix(self.seed, 3), at.epoch), at.sample))
        with _in_worker(self.source):
            return next(self._steps, END)

    def _begin(self, epoch: int) -> None:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        seed_all(mix(mix(self.seed, 4), epoch))
        self._steps = iter(self.source)

    def _enter_anew(self, epoch: int) -> None:
        """A state told behind the last batch may give an empty rest of that epoch first, as torchdata's does."""
        first = next(self._steps, END)
        if first is END:
            self._begin(epoch)
        else:
            self._steps = itertools.chain((first,), self._steps)


class Batched:
    """The batches of an iterable data set."""

    def __init__(self, dataset: Iterable[object], size: int, collate: Collate, *, drop_last: bool) -> None:
        if iter(dataset) is dataset:
            raise LoaderError(f"a {type(dataset).__name__} can be iterated once only; give a data set whose __iter__ starts anew")
        self.dataset, self.size, self.collate, self.drop_last = dataset, size, collate, drop_last

    def __iter__(self) -> Iterator[object]:
        samples: list[object] = []
        for sample in self.dataset:
            samples.append(sample)
            if len(samples) == self.size:
                yield self.collate(samples)
                samples = []
        if samples and not self.drop_last:
            yield self.collate(samples)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class StatefulBatched(Batched):
    """The same, with the data set's own state, which is asked for between batches only."""

    def state_dict(self) -> Mapping[str, object]:
        """The data set's state."""
        return cast(Stateful, self.dataset).state_dict()

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Give the data set its state back."""
        cast(Stateful, self.dataset).load_state_dict(state)


Source = MapSource | StreamSource
_numbers = {"id": 0, "workers": 1}


def be_worker(number: int, count: int) -> None:
    """Let data sets see, through ``get_worker_info``, which worker of how many this process is."""
    _numbers.update(id=number, workers=count)


@contextmanager
def _in_worker(dataset: object) -> Iterator[None]:
    """Only while the data set runs: collating would put tensors into shared memory of torch's otherwise."""
    before = get_worker_info()
    if before is None:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=_numbers["id"], num_workers=_numbers["workers"], seed=torch.initial_seed(), dataset=cast("Dataset[object]", dataset)
        )
    try:
        yield
    finally:
        torch_worker._worker_info = before
