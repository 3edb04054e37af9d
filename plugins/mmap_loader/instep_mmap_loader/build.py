"""Turns the arguments that people know from ``DataLoader`` into a source of batches."""

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Protocol, cast

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from instep.agent.channel import Environment
from instep.errors import UsageError
from instep_mmap_loader.order import At, ConsumedOrder, GlobalOrder, Order, SamplerOrder
from instep_mmap_loader.sources import Batched, Collate, MapSource, Source, Stateful, StatefulBatched, StreamSource


class MapStyle(Protocol):
    """A data set with samples by index."""

    def __getitem__(self, index: int, /) -> object:
        """One sample."""

    def __len__(self) -> int:
        """Number of samples."""


@dataclass(frozen=True)
class Arguments:
    """What the loader was called with; see ``MmapLoader``."""

    dataset: object
    batch_size: int | None
    shuffle: bool
    sampler: Iterable[object] | None
    batch_sampler: Iterable[object] | None
    collate_fn: Callable[..., object] | None
    drop_last: bool
    seed: int
    rank: int | None
    world: int | None
    seed_samples: bool
    readers: int = 1


def shard(given: Arguments) -> tuple[int, int]:
    """Which part of the data this rank reads, and of how many, as far as can be told: the caches' names and fingerprints differ by it."""
    if given.rank is not None and given.world is not None:
        return given.rank, given.world
    for owner in (given.sampler, given.batch_sampler, getattr(given.batch_sampler, "sampler", None)):
        for rank, world in (("rank", "num_replicas"), ("data_parallel_rank", "data_parallel_size")):
            if isinstance(found := getattr(owner, rank, None), int):
                return found, getattr(owner, world, 1)
    if given.readers > 1:
        return 0, 1
    own = Environment.read()  # a stream's data set may look there, before or without a process group
    return _position(given) if dist.is_available() and dist.is_initialized() else (own.rank, own.world_size)


def build(given: Arguments) -> tuple[Source, At]:
    """The source, and where its first batch is. Raises ``UsageError`` for arguments that exclude each other."""
    _check(given)
    dataset = given.dataset
    if isinstance(dataset, DataLoader):
        return StreamSource(dataset, stride=dataset.batch_size or 1, seed=given.seed), At(0, 0)
    collate = cast(Collate, given.collate_fn or (default_convert if given.batch_size is None else default_collate))
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return _stream(given, cast(Iterable[object], dataset), collate), At(0, 0)
    order = _order(given)
    batched = given.batch_sampler is not None or given.batch_size is not None
    source = MapSource(dataset, order, collate, batched=batched, seed=given.seed, seed_samples=given.seed_samples)
    return source, order.first() if isinstance(order, ConsumedOrder) else At(0, 0)


def _stream(given: Arguments, dataset: Iterable[object], collate: Collate) -> StreamSource:
    if given.shuffle or given.sampler is not None or given.batch_sampler is not None:
        raise UsageError("MmapLoader: an iterable data set has its own order; leave out shuffle, sampler and batch_sampler")
    if given.batch_size is None:
        return StreamSource(dataset, stride=1, seed=given.seed)
    kind = StatefulBatched if isinstance(dataset, Stateful) else Batched
    source = kind(dataset, given.batch_size, collate, drop_last=given.drop_last)
    return StreamSource(source, stride=given.batch_size, seed=given.seed)


def _order(given: Arguments) -> Order:
    world = given.world or 1
    if given.batch_sampler is not None:
        if hasattr(given.batch_sampler, "consumed_samples"):
            return ConsumedOrder(given.batch_sampler, seed=given.seed)
        return SamplerOrder(given.batch_sampler, None, whole=True, seed=given.seed, world=world)
    if given.sampler is not None:
        return SamplerOrder(given.sampler, given.batch_size or 1, whole=not given.drop_last, seed=given.seed, world=world)
    rank, world = _position(given)
    if given.readers > 1 and given.rank is None and world > 1:
        raise UsageError(
            f"MmapLoader: readers={given.readers} ranks of {world} read the same batches, so rank= and world= must tell which; give the "
            "data-parallel rank and size"
        )
    return GlobalOrder(
        len(cast(Sized, given.dataset)),
        given.batch_size or 1,
        shuffle=given.shuffle,
        drop_last=given.drop_last,
        seed=given.seed,
        rank=rank,
        world=world,
    )


def _position(given: Arguments) -> tuple[int, int]:
    if given.rank is not None and given.world is not None:
        return given.rank, given.world
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _check(given: Arguments) -> None:
    if given.sampler is not None and given.shuffle:
        raise UsageError("MmapLoader: sampler and shuffle exclude each other; shuffle in the sampler")
    if given.batch_sampler is not None and (
        given.batch_size not in (1, None) or given.shuffle or given.sampler is not None or given.drop_last
    ):
        raise UsageError("MmapLoader: batch_sampler excludes batch_size, shuffle, sampler and drop_last")
    if (given.rank is None) != (given.world is None):
        raise UsageError("MmapLoader: rank and world belong together")
    if given.rank is not None and given.world is not None and not 0 <= given.rank < given.world:
        raise UsageError(f"MmapLoader: rank {given.rank} of a world of {given.world}")
    if given.batch_size is not None and given.batch_size < 1:
        raise UsageError(f"MmapLoader: batch_size {given.batch_size} is not positive")
