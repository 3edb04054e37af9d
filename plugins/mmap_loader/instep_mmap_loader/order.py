"""The order of samples: a pure function of seed, epoch and samples consumed, so that it can be entered anywhere without fetching."""

import copy
import math
from collections.abc import Iterable, Iterator, Sized
from typing import NamedTuple, Protocol, cast

import torch

from instep.torch.sampling import Order as TorchOrder
from instep.torch.sampling import Position, mix

Indices = list[object]


class At(NamedTuple):
    """A place in the stream: epoch, and samples of all ranks consumed in it."""

    epoch: int
    sample: int


class Leg(NamedTuple):
    """One batch of this rank: where it begins, the samples it takes (``None``: the epoch is empty), and where the next one begins."""

    at: At
    indices: Indices | None
    next: At


class Order(Protocol):
    """Which samples make up the batches of one rank."""

    def walk(self, at: At) -> Iterator[Leg]:
        """All batches from a place on, epoch after epoch, without end."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def identity(self) -> object:
        """What the order depends on, as JSON."""


class GlobalOrder:
    """The default: one permutation for all ranks; each global batch is a stretch of it, cut into one slice for each rank.

    Its cursor counts samples of all ranks, so another number of ranks goes on at the very same sample. A last global batch that is
    short is dropped, or filled up from the epoch's beginning to be divisible among the ranks.
    """

    def __init__(self, size: int, batch: int, *, shuffle: bool, drop_last: bool, seed: int, rank: int, world: int) -> None:
        self.size, self.batch, self.shuffle, self.drop_last = size, batch, shuffle, drop_last
        self.seed, self.rank, self.world = seed, rank, world

    @property
    def stride(self) -> int:
        """Samples in a global batch."""
        return self.batch * self.world

    def walk(self, at: At) -> Iterator[Leg]:
        """All batches from a place on."""
        epoch, start = at
        while True:
            order = self._permutation(epoch)
            if not self._fits(start):
                yield Leg(At(epoch, start), None, At(epoch + 1, 0))
            while self._fits(start):
                end = start + self.stride
                yield Leg(At(epoch, start), self._slice(order, start), At(epoch, end) if self._fits(end) else At(epoch + 1, 0))
                start = end
            epoch, start = epoch + 1, 0

    def __len__(self) -> int:
        return self.size // self.stride if self.drop_last else math.ceil(self.size / self.stride)

    def identity(self) -> object:
        """What the order depends on."""
        return [type(self).__name__, self.size, self.batch, self.shuffle, self.drop_last, self.seed, self.rank, self.world]

    def _fits(self, start: int) -> bool:
        return start + self.stride <= self.size if self.drop_last else start < self.size

    def _permutation(self, epoch: int) -> "torch.Tensor | None":
        if not self.shuffle:
            return None
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(mix(mix(self.seed, 0), epoch)))

    def _slice(self, order: "torch.Tensor | None", start: int) -> Indices:
        share = math.ceil(min(self.stride, self.size - start) / self.world)
        own = range(start + self.rank * share, start + (self.rank + 1) * share)
        places = [place if place < self.size else place % self.size for place in own]
        return cast(Indices, places if order is None else order[places].tolist())


class SamplerOrder:
    """The order of a sampler or batch sampler of the user's. Its draws follow from seed and epoch; ``set_epoch`` is called if there.

    Args:
        sampler: yields indices, or lists of indices.
        batch: indices to a batch; ``None`` when the sampler yields whole batches.
        whole: keep a last batch that is short.
        seed: what the sampler's draws follow from.
        world: ranks that share the data set, for the cursor.
    """

    def __init__(self, sampler: Iterable[object], batch: int | None, *, whole: bool, seed: int, world: int) -> None:
        self.sampler, self.batch, self.whole, self.seed, self.world = sampler, batch, whole, seed, world

    def walk(self, at: At) -> Iterator[Leg]:
        """All batches from a place on; a place inside an epoch is reached by drawing indices, not by fetching samples."""
        epoch, skip = at
        while True:
            place = 0
            ahead: Leg | None = None
            for indices in self._batches(epoch):
                end = place + len(indices) * self.world
                if place >= skip:
                    if ahead is not None:
                        yield ahead
                    ahead = Leg(At(epoch, place if ahead is not None else skip), indices, At(epoch, end))
                place = end
            yield ahead._replace(next=At(epoch + 1, 0)) if ahead is not None else Leg(At(epoch, skip), None, At(epoch + 1, 0))
            epoch, skip = epoch + 1, 0

    def __len__(self) -> int:
        size = len(cast(Sized, self.sampler))
        if self.batch is None:
            return size
        return math.ceil(size / self.batch) if self.whole else size // self.batch

    def identity(self) -> object:
        """What the order depends on, besides the sampler itself."""
        return [type(self).__name__, self.batch, self.whole, self.seed, self.world]

    def _batches(self, epoch: int) -> Iterator[Indices]:
        for generator in _generators(self.sampler):
            generator.manual_seed(mix(mix(self.seed, 1), epoch))
        for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        gathered: Indices = []
        for step in TorchOrder(self.sampler, Position(order_seed=mix(mix(self.seed, 0), epoch)), workers=False):
            if self.batch is None:
                yield list(cast(Iterable[object], step))
                continue
            gathered.append(step)
            if len(gathered) == self.batch:
                yield gathered
                gathered = []
        if gathered and self.whole:
            yield gathered


class ConsumedOrder:
    """Megatron's samplers, which take up at ``consumed_samples`` by themselves: any place is reached in no time."""

    def __init__(self, sampler: Iterable[object], *, seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.stride: int = getattr(sampler, "micro_batch_times_data_parallel_size", 0) or (
            sampler.micro_batch_size * sampler.data_parallel_size  # type: ignore[attr-defined]
        )
        total: int = sampler.total_samples  # type: ignore[attr-defined]
        self.cyclic = hasattr(sampler, "last_batch_size")
        self.size = total - total % self.stride if self.cyclic or getattr(sampler, "drop_last", True) else total

    def first(self) -> At:
        """Where the sampler itself stands."""
        consumed: int = self.sampler.consumed_samples  # type: ignore[attr-defined]
        return At(*divmod(consumed, self.size)) if self.cyclic and self.size else At(0, consumed)

    def walk(self, at: At) -> Iterator[Leg]:
        """All batches from a place on."""
        epoch, start = at
        while True:
            sampler = copy.copy(self.sampler)
            sampler.consumed_samples = start + (epoch * self.size if self.cyclic else 0)  # type: ignore[attr-defined]
            if start >= self.size:
                yield Leg(At(epoch, start), None, At(epoch + 1, 0))
            else:
                for indices in TorchOrder(sampler, Position(order_seed=mix(mix(self.seed, 0), epoch)), workers=False):
                    end = start + self.stride
                    last = end >= self.size
                    yield Leg(At(epoch, start), list(cast(Iterable[object], indices)), At(epoch + 1, 0) if last else At(epoch, end))
                    start = end
                    if last:
                        break
            epoch, start = epoch + 1, 0

    def __len__(self) -> int:
        return math.ceil(self.size / self.stride)

    def identity(self) -> object:
        """What the order depends on, besides the sampler itself."""
        return [type(self).__name__, self.size, self.stride, self.seed]


def _generators(sampler: object) -> list[torch.Generator]:
    owners = [sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    return [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
