"""Orders without a cache: pure, complete, enterable anywhere, and the same over a change of the data-parallel size."""

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from instep_mmap_loader import MmapLoader
from instep_mmap_loader.order import At, ConsumedOrder, GlobalOrder, Leg, Order, SamplerOrder

from things import Samples, take  # isort: skip


class Sequential:
    """The shape of Megatron's sequential sampler."""

    def __init__(self, total: int, consumed: int, micro: int, rank: int, size: int) -> None:
        self.total_samples, self.consumed_samples = total, consumed
        self.micro_batch_size, self.data_parallel_rank, self.data_parallel_size = micro, rank, size
        self.micro_batch_times_data_parallel_size = micro * size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed_samples, self.total_samples):
            batch.append(index)
            if len(batch) == self.micro_batch_times_data_parallel_size:
                start = self.data_parallel_rank * self.micro_batch_size
                yield batch[start : start + self.micro_batch_size]
                batch = []


class Cyclic(Sequential):
    """The shape of Megatron's random sampler: an epoch follows from the samples consumed, which it counts itself."""

    def __init__(self, total: int, consumed: int, micro: int, rank: int, size: int) -> None:
        super().__init__(total, consumed, micro, rank, size)
        self.last_batch_size = total % self.micro_batch_times_data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        active = self.total_samples - self.last_batch_size
        epoch, at = divmod(self.consumed_samples, active)
        order = torch.randperm(active, generator=torch.Generator().manual_seed(epoch)).tolist()
        own = order[self.data_parallel_rank :: self.data_parallel_size][at // self.data_parallel_size :]
        for start in range(0, len(own) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self.micro_batch_times_data_parallel_size
            yield own[start : start + self.micro_batch_size]


ORDERS: dict[str, Order] = {
    "shuffled": GlobalOrder(50, 4, shuffle=True, drop_last=False, seed=1, rank=1, world=3),
    "dropping": GlobalOrder(50, 4, shuffle=True, drop_last=True, seed=1, rank=2, world=3),
    "random sampler": SamplerOrder(RandomSampler(range(30)), 4, whole=True, seed=1, world=1),
    "own generator": SamplerOrder(RandomSampler(range(30), generator=torch.Generator()), 4, whole=False, seed=1, world=1),
    "weighted": SamplerOrder(WeightedRandomSampler([1.0, 2.0, 3.0], 20), 3, whole=True, seed=1, world=1),
    "distributed": SamplerOrder(DistributedSampler(range(31), 3, 1), 4, whole=True, seed=1, world=3),  # type: ignore[arg-type]
    "batch sampler": SamplerOrder(BatchSampler(SequentialSampler(range(30)), 7, drop_last=False), None, whole=True, seed=1, world=1),
    "sequential": ConsumedOrder(Sequential(50, 0, 3, 1, 2), seed=1),
    "cyclic": ConsumedOrder(Cyclic(50, 0, 3, 1, 2), seed=1),
}


def legs(order: Order, at: At, count: int) -> list[Leg]:
    return list(itertools.islice(order.walk(at), count))


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_can_be_entered_anywhere(name: str) -> None:
    """From each place on, the rest is the rest; nothing depends on the generators outside, nor moves them."""
    order = ORDERS[name]
    torch.manual_seed(1)
    whole = legs(order, At(0, 0), 40)
    assert [leg.next for leg in whole[:-1]] == [leg.at for leg in whole[1:]]
    assert sum(leg.at.epoch == 1 for leg in whole) == len(order) or "sequential" in name
    torch.manual_seed(2)
    before = torch.get_rng_state()
    for index in (1, 5, 11, 17, 23):
        assert legs(order, whole[index].at, 15) == whole[index : index + 15]
    assert torch.equal(torch.get_rng_state(), before)


@given(size=st.integers(0, 70), batch=st.integers(1, 5), world=st.integers(1, 4), drop=st.booleans(), shuffle=st.booleans())
@settings(max_examples=80, deadline=None)
def test_ranks_cover_an_epoch_exactly_once(size: int, batch: int, world: int, drop: bool, shuffle: bool) -> None:
    orders = [GlobalOrder(size, batch, shuffle=shuffle, drop_last=drop, seed=3, rank=r, world=world) for r in range(world)]
    epochs = [list(itertools.takewhile(lambda leg: leg.at.epoch == 0, order.walk(At(0, 0)))) for order in orders]
    assert {len([leg for leg in epoch if leg.indices]) for epoch in epochs} == {len(orders[0])}
    got = sorted(int(str(index)) for epoch in epochs for leg in epoch for index in leg.indices or [])
    if drop:
        assert len(set(got)) == len(got) == size - size % (batch * world)
    else:
        assert set(got) == set(range(size))
        assert len(got) - size < world


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
def test_another_number_of_ranks_goes_on_at_the_same_sample(before: int, after: int) -> None:
    """No sample of the epoch is lost or repeated, whatever sharding it began and ended with."""

    def loaders(world: int) -> list[MmapLoader]:
        size = 12 // world
        return [MmapLoader(Samples(96), size, shuffle=True, seed=4, rank=r, world=world, cache=False) for r in range(world)]

    seen: list[int] = []
    first = loaders(before)
    for loader in first:
        for batch in itertools.islice(iter(loader), 3):
            assert isinstance(batch, dict)
            seen += batch["index"].tolist()
    state = first[0].state_dict()
    assert all(loader.state_dict() == state for loader in first)
    for loader in loaders(after):
        loader.load_state_dict(state)
        for batch in loader:
            assert isinstance(batch, dict)
            seen += batch["index"].tolist()
    assert sorted(seen) == list(range(96))


def test_batches_are_those_of_a_plain_data_loader() -> None:
    class Fixed(Samples):
        def __getitem__(self, index: int) -> dict[str, object]:
            return {"index": index, "x": torch.full((3,), float(index))}

    each: list[dict[str, Any]] = [{"batch_size": 7}, {"batch_size": 7, "drop_last": True}, {"sampler": range(3, 40, 2), "batch_size": 4}]
    for arguments in each:
        plain = DataLoader(cast("Dataset[Any]", Fixed()), **arguments)
        ours = MmapLoader(Fixed(), cache=False, **arguments)
        assert len(plain) == len(ours)
        for one, other in zip(plain, ours, strict=True):
            assert one["index"].tolist() == other["index"].tolist()  # type: ignore[index]
            assert torch.equal(one["x"], other["x"])  # type: ignore[index]


def test_an_epoch_that_is_left_is_over() -> None:
    loader = MmapLoader(Samples(), 4, cache=False)
    first = take(loader, 2, epochs=1)
    assert loader.epoch == 0
    again = [batch for _, batch in zip(range(2), loader, strict=False)]
    assert loader.epoch == 1
    assert len(first) == len(again) == 2
