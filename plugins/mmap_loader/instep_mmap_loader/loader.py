"""``MmapLoader``: a loader whose next batch is there before the trainer is, also after the trainer was killed.

    loader = MmapLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    session.protect(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader: ...

The stream is a pure function of seed, epoch and consumed samples. The cache below it changes the time that a batch takes, and nothing
else: it may be off, wiped or damaged at any moment.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch

from instep import codec
from instep.errors import UsageError
from instep.torch.sampling import unmoved
from instep_mmap_loader.agree import agree
from instep_mmap_loader.build import Arguments, build, shard
from instep_mmap_loader.cache import Cache
from instep_mmap_loader.errors import LoaderError, NoRoom
from instep_mmap_loader.lifetime import close_with, default_directory, enlist
from instep_mmap_loader.order import At, Leg
from instep_mmap_loader.place import Options, open_cache
from instep_mmap_loader.recipe import importing
from instep_mmap_loader.record import Content
from instep_mmap_loader.sources import END, MapSource, Produced, Stateful, StreamSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
State = Mapping[str, object]


class MmapLoader:
    """Batches of a data set, prefetched into shared memory by a process that outlives this one.

    Args:
        dataset: map-style or iterable; or a ``StatefulDataLoader``, whose batches are taken as they are.
        batch_size: samples of a batch of this rank; ``None``: the data set yields whole batches.
        shuffle, sampler, batch_sampler, collate_fn, pin_memory, drop_last, worker_init_fn: as for ``DataLoader``. Megatron's samplers
            are batch samplers. Without a sampler each rank gets its share of every global batch.
        num_workers: processes that fetch; 0 is one, since the trainer never does.
        timeout: seconds to wait for a batch before ``LoaderError``.
        seed: what order and transforms follow from.
        rank, world: data-parallel rank and size; by default those of the default process group.
        name: tells several loaders of one job apart.
        prefetch, lookback: batches kept ready ahead of this rank, and kept behind it for a roll-back.
        seed_samples: seed python, numpy and torch for each sample; ``False`` is faster, for data sets that draw nothing.
        cache: ``False`` fetches in this process. The stream is the same.
        directory, capacity: where the cache lies (by default as the plugin is set, else /dev/shm), and how many bytes it may take.
        idle: seconds that the producer waits for a killed trainer to come back.
        identity: names the version of the data set; without it its pickled form does.
        run: which run the cache belongs to; by default the job, or the script.
        readers, reader: how many ranks of this node read the same stream, and which one this is (tensor, pipeline, context parallel).
        group: the process group of those ranks; they agree on the place whenever a pass begins.

    Raises:
        UsageError: arguments exclude each other, or there is less memory than ``capacity``.
        LoaderError: the cache's directory is not to be trusted.
    """

    # fmt: off
    def __init__(
        self, dataset: object, batch_size: int | None = 1, *, shuffle: bool = False, sampler: Iterable[object] | None = None,
        batch_sampler: Iterable[object] | None = None, num_workers: int = 0, collate_fn: Callable[..., object] | None = None,
        pin_memory: bool = False, drop_last: bool = False, timeout: float = 300.0, worker_init_fn: Callable[[int], None] | None = None,
        seed: int = 0, rank: int | None = None, world: int | None = None, name: str = "loader", prefetch: int = 8, lookback: int = 4,
        seed_samples: bool = True, cache: bool = True, directory: str | None = None, capacity: int | None = None, idle: float = 20.0,
        identity: str | None = None, run: str | None = None, readers: int = 1, reader: int = 0, group: "ProcessGroup | None" = None,
    ) -> None:
        # fmt: on
        if importing():
            raise LoaderError("the script builds its loader when it is imported: put that below `if __name__ == '__main__':`")
        given = Arguments(
            dataset, batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last, seed, rank, world, seed_samples, readers
        )
        self._source, first = build(given)
        self.dataset, self.batch_size, self.seed, self.pin_memory = dataset, batch_size, seed, pin_memory
        self._timeout, self._group = timeout, group
        self._next = self._committed = first
        self._epoch = first.epoch
        self._state: bytes | None = None
        self._open = self._resumed = self.follows = False
        self._held: Content | None = None
        self._walk: Iterator[Leg] | None = None
        self._walked = first
        place = directory or default_directory()
        options = Options(name, prefetch, lookback, num_workers, place, capacity, idle, identity, run, readers, reader, shard(given))
        self._cache = open_cache(self._source, options, worker_init_fn, collate_fn, self._allocate) if cache else None
        if self._cache is not None:
            self._finalizer = close_with(self, self._cache)
            self._without_cache_if_failed(lambda cache: cache.begin(first))
        enlist(self)

    @property
    def epoch(self) -> int:
        """Number of the present pass, or of the next one between passes."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.set_epoch(value)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of an epoch, from its beginning."""
        self._go(At(epoch, 0), epoch, None)

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        source = self._source
        return len(source.order) if isinstance(source, MapSource) else len(source.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[object]:
        """A pass: from the loaded position on, else over the next epoch."""
        if self._open and not self._resumed:
            self._go(At(self._epoch + 1, 0), self._epoch + 1, None)
        self._open, self._resumed = True, False
        if self._group is not None:
            valid = self._cache.valid(self._next, 64) if self._cache is not None else 0
            agree(self._group, self._next, valid)
        self._stand()
        return _Pass(self)

    def state_dict(self) -> dict[str, object]:
        """The position behind the batches delivered: epoch, samples of all ranks consumed, and the source's own state, if it has one."""
        state = codec.decode(self._state) if self._state is not None else None
        return {"epoch": self._epoch, "next_epoch": self._next.epoch, "consumed": self._next.sample, "seed": self.seed, "source": state}

    def load_state_dict(self, state: State, /) -> None:
        """Go on where a state was told, also with another number of ranks. Raises ``UsageError`` if it was told with another seed."""
        if state["seed"] != self.seed:
            raise UsageError(
                f"MmapLoader: the position was saved with seed={state['seed']}, this loader has seed={self.seed}; give that seed"
            )
        place = At(cast(int, state["next_epoch"]), cast(int, state["consumed"]))
        source = state["source"]
        if isinstance(self._source, StreamSource) and not isinstance(self._source.source, Stateful) and place.sample:
            warnings.warn(
                f"MmapLoader: {self._source.name} has no state_dict(): without the cache, batches are fetched and dropped", stacklevel=2
            )
        self._go(place, cast(int, state["epoch"]), None if source is None else codec.encode(source))
        self._resumed = True

    def committed(self) -> None:
        """A commit made the batches delivered so far final."""
        self._committed = self._next
        self._stand()

    def ready(self) -> int | None:
        """Bytes of the next batch if it lies in the cache, verified and taken for delivery; ``None`` if it must be made."""
        if self._cache is None or self._next.epoch != self._epoch:
            return None
        self._stand()
        self._held = self._cache.look(self._next)
        return self._held.size if self._held is not None and self._held.label.kind == "batch" else None

    def close(self) -> None:
        """End the producer, if nobody else reads with it, and remove the cache. Takes less than a second."""
        cache, self._cache = self._cache, None
        if cache is not None:
            self._finalizer.detach()
            cache.close(remove=True)

    def abandon(self) -> None:
        """In a forked child of the trainer: the cache is the parent's, here batches are fetched without it."""
        cache, self._cache = self._cache, None
        if cache is not None:
            self._finalizer.detach()
            cache.abandon()

    def following(self) -> object:
        """The next batch of the pass. Raises ``StopIteration`` at its end, ``LoaderError`` for what the data set raised."""
        if not self._open or self._next.epoch != self._epoch:
            self._open, self._epoch = False, self._next.epoch
            raise StopIteration
        place = self._next
        produced = self._cached(place) if self._cache is not None else self._direct(place)
        self._next, self._state = produced.next, produced.state
        if not self.follows:
            self._committed = self._next
        self._stand()
        if produced.batch is END:
            return self.following()
        return produced.batch

    def _cached(self, place: At) -> Produced:
        content, self._held = self._held, None
        if content is None or content.label.at != place:
            content = self._without_cache_if_failed(lambda cache: cache.take(place, deadline=self._timeout, state=self._state))
        if content is None or content.label.kind == "bypass":
            if content is not None:
                log.warning("the batch at epoch %d, sample %d bypasses the cache: %s", *place, content.tree)
            return self._direct(place)
        if content.label.kind == "error":
            assert self._cache is not None
            self._cache.take_out(place)
            raise LoaderError(f"loader: the batch at epoch {place.epoch}, sample {place.sample} failed in the producer:\n{content.tree}")
        return Produced(END if content.label.kind == "end" else content.tree, content.label.next, content.state)

    def _direct(self, place: At) -> Produced:
        """Fetch in this process."""
        with unmoved():
            source = self._source
            if isinstance(source, StreamSource):
                return source.fetch(place, self._state)
            if self._walk is None or self._walked != place:
                self._walk = source.order.walk(place)
            leg = next(self._walk)
            self._walked = leg.next
            return source.fetch(leg)

    def _without_cache_if_failed(self, call: "Callable[[Cache], Content | None]") -> Content | None:
        assert self._cache is not None
        try:
            return call(self._cache)
        except (NoRoom, OSError) as error:
            warnings.warn(f"MmapLoader goes on without its cache, more slowly: {error}", stacklevel=4)
            self.close()
            return None

    def _go(self, place: At, epoch: int, state: bytes | None) -> None:
        self._next = self._committed = place
        self._epoch, self._state = epoch, state
        self._open = self._resumed = False
        self._held = None
        if self._cache is not None and state is not None:
            self._cache.leave_state(place, state)

    def _stand(self) -> None:
        if self._cache is not None:
            self._cache.stand(self._next, self._committed)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin_memory and torch.cuda.is_available())


class _Pass(Iterator[object]):
    """What ``iter(loader)`` gives; the position is the loader's."""

    def __init__(self, loader: MmapLoader) -> None:
        self._loader = loader

    def __next__(self) -> object:
        return self._loader.following()
