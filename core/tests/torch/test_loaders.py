"""A loader that is interrupted anywhere delivers, all in all, exactly what it delivers uninterrupted."""
# ruff: noqa: NPY002 - the global generators are what is tested

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from instep import codec
from instep.errors import Interrupted, UsageError
from instep.torch.loaders import Cursor, adopt
from instep.torch.passes import PassCursor

Loader = Any
"""A loader, with what adoption adds to it."""
EPOCHS = 2
ITEMS = 11
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:.*worker processes in total.*:UserWarning")


class Noisy(Dataset[torch.Tensor]):
    """Every item is changed by a random transform from each of the three libraries."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Fetching(Noisy):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self[i] for i in indices]


class Unruly(Sampler[int]):
    """Draws from every global generator at every step."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(ITEMS):
            yield (random.randrange(ITEMS) + np.random.randint(ITEMS) + int(torch.randint(ITEMS, ()))) % ITEMS


class Ragged(Sampler[list[int]]):
    """Batches of random length."""

    def __iter__(self) -> Iterator[list[int]]:
        left = ITEMS
        while left > 0:
            size = min(left, random.randint(1, 4))
            left -= size
            yield [random.randrange(ITEMS) for _ in range(size)]


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(data: Any, **arguments: Any) -> Loader:
    return DataLoader(data, **{"batch_size": 3, **arguments})


def adopted(loader: object) -> Cursor:
    cursor = adopt("loader", loader, on_delivery=lambda: None)
    assert cursor is not None
    return cursor


def with_replacement(**arguments: torch.Generator) -> RandomSampler:
    return RandomSampler(Noisy(), replacement=True, num_samples=40, **arguments)


LOADERS: dict[str, Callable[..., Loader]] = {
    "sequential": lambda **kw: batches(Noisy(), **kw),
    "shuffle": lambda **kw: batches(Noisy(), shuffle=True, **kw),
    "drop_last": lambda **kw: batches(Noisy(), shuffle=True, drop_last=True, **kw),
    "generator": lambda **kw: batches(Noisy(), shuffle=True, generator=seeded(), **kw),
    "sampler_generator": lambda **kw: batches(Noisy(), sampler=RandomSampler(Noisy(), generator=seeded()), **kw),
    "replacement": lambda **kw: batches(Noisy(), sampler=with_replacement(generator=seeded()), **kw),
    "replacement_global": lambda **kw: batches(Noisy(), sampler=with_replacement(), **kw),
    "subset": lambda **kw: batches(Noisy(), sampler=SubsetRandomSampler(range(7)), **kw),
    "weighted": lambda **kw: batches(Noisy(), sampler=WeightedRandomSampler([1.0] * ITEMS, 10), **kw),
    "distributed": lambda **kw: batches(Noisy(), sampler=DistributedSampler(Noisy(), 2, 1, seed=3), **kw),
    "unruly": lambda **kw: batches(Noisy(), sampler=Unruly(), **kw),
    "ragged": lambda **kw: DataLoader(Noisy(), batch_sampler=Ragged(), **kw),
    "batch_sampler": lambda **kw: DataLoader(Noisy(), batch_sampler=BatchSampler(SequentialSampler(Noisy()), 4, drop_last=False), **kw),
    "unbatched": lambda **kw: DataLoader(Noisy(), batch_size=None, shuffle=True, **kw),
    "list_sampler": lambda **kw: batches(Noisy(), sampler=[4, 2, 0, 9], **kw),
    "getitems": lambda **kw: batches(Fetching(), shuffle=True, **kw),
    "pinned": lambda **kw: batches(Noisy(), shuffle=True, pin_memory=True, **kw),
}


class Run:
    """What a session does around a loader: a record at each commit, and a return to it after a fault."""

    def __init__(self, make: Callable[[], Loader], *, set_epoch: bool = False) -> None:
        self.set_epoch = set_epoch
        self.committed: list[bytes] = []
        self.fault_at: int | None = None
        self.notices = 0
        self._make = make
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self._build()
        self._record: Any = None
        self._commit()

    def _build(self) -> None:
        self.loader = self._make()
        cursor = adopt("loader", self.loader, on_delivery=self._notice)
        assert cursor is not None
        self.cursor: Cursor = cursor

    def _notice(self) -> None:
        self.notices += 1
        if self.notices == self.fault_at:
            raise Interrupted

    def _commit(self) -> None:
        rng = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._record = codec.encode(self.cursor.state()), rng, len(self.committed)

    def close(self) -> None:
        """End the worker processes before the garbage collector finds them."""
        self.cursor.release()

    def recover(self, *, replaced: bool) -> None:
        """Go back to the record, as a survivor or as a replacement that built everything anew."""
        self.cursor.quiesce()
        if replaced:
            self.close()
            torch.rand(7)
            self._build()
        state, (python, numpy, cpu), count = self._record
        self.cursor.load(codec.decode(state))
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        del self.committed[count:]

    def block(self) -> None:
        """The loop of the README."""
        for epoch in range(self.loader.epoch, EPOCHS):
            if self.set_epoch:
                self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.committed.append(batch.numpy().tobytes())
                self._commit()
            self.committed.append(f"end of {epoch}, {torch.rand(()).item()}".encode())

    def run(self, fault_at: int | None = None, *, replaced: bool = False) -> list[bytes]:
        self.fault_at = fault_at
        try:
            self.block()
        except Interrupted:
            self.recover(replaced=replaced)
            self.block()
        self.close()
        return self.committed


def all_points(make: Callable[[], Loader], *, stride: int = 1, **options: bool) -> None:
    """Interrupt at every notice (before and after each fetch, epoch turns included), as survivor and as replacement in turn.

    With ``stride`` 2: before each fetch only.
    """
    clean = Run(make, **options)
    expected = clean.run()
    assert len({e for e in expected if not e.startswith(b"end")}) > EPOCHS
    for turn, point in enumerate(range(1, clean.notices + 1, stride)):
        assert Run(make, **options).run(point, replaced=turn % 2 == 0) == expected, f"interrupted at notice {point}"


@pytest.mark.parametrize("kind", LOADERS)
def test_interrupted_anywhere_in_process(kind: str) -> None:
    all_points(lambda: LOADERS[kind]())


def test_distributed_sampler_with_set_epoch() -> None:
    all_points(lambda: LOADERS["distributed"](), set_epoch=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "generator", "distributed", "unruly", "ragged", "unbatched", "getitems", "pinned"])
def test_interrupted_anywhere_with_workers(kind: str) -> None:
    all_points(lambda: LOADERS[kind](num_workers=2), stride=2)


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}, {"prefetch_factor": 4}], ids=["plain", "persistent", "prefetch"])
def test_interrupted_anywhere_with_workers_and_options(arguments: dict[str, object]) -> None:
    all_points(lambda: LOADERS["shuffle"](num_workers=2, **arguments), stride=2)


def test_a_fault_between_two_faults_and_in_the_epoch_after() -> None:
    make = LOADERS["shuffle"]
    expected = Run(make).run()
    run = Run(make)
    for point in (4, 9, 12, 17):
        run.fault_at = point
        with suppress(Interrupted):
            run.block()
        run.recover(replaced=point == 9)
    run.fault_at = None
    run.block()
    assert run.committed == expected


def test_epoch_advances_when_all_is_delivered_and_can_be_set() -> None:
    loader = LOADERS["sequential"]()
    adopted(loader)
    assert (loader.epoch, len(loader)) == (0, 4)
    for _ in loader:
        assert loader.epoch == 0
    assert loader.epoch == 1
    for _ in loader:
        break
    assert loader.epoch == 1
    for _ in loader:
        assert loader.epoch == 2
    loader.epoch = 7
    assert len(list(loader)) == 4
    assert loader.epoch == 8


def test_an_iterator_made_outside_the_block_survives() -> None:
    run = Run(LOADERS["shuffle"])
    expected = [b.numpy().tobytes() for b in run.loader]
    run = Run(LOADERS["shuffle"])
    steps = iter(run.loader)
    next(steps)
    run._commit()
    next(steps)
    next(steps)
    run.recover(replaced=False)
    assert [b.numpy().tobytes() for b in steps] == expected[1:]
    assert next(steps, None) is None


def test_a_further_iterator_of_the_present_pass() -> None:
    """For frameworks: it goes on with the pass after a recovery, and the next `iter` is the next pass."""
    loader = batches(range(9))
    cursor = adopted(loader)
    assert isinstance(cursor, PassCursor)
    next(iter(loader))
    recorded = cursor.state()
    cursor.load(recorded)
    assert [torch.as_tensor(batch).tolist() for batch in cursor.again()] == [[3, 4, 5], [6, 7, 8]]
    cursor.load(recorded)
    rest = cursor.again()
    next(rest)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


class Told:
    """A loader of three batches an epoch that tells its position; a pass after its end is the next epoch."""

    def __init__(self) -> None:
        self.at, self.loaded = (0, 0), True

    def __iter__(self) -> Iterator[object]:
        if not self.loaded:
            self.at = (self.at[0] + 1, 0)
        self.loaded = False
        return self.steps()

    def steps(self) -> Iterator[object]:
        while self.at[1] < 3:
            self.at = (self.at[0], self.at[1] + 1)
            yield self.at

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.at, self.loaded = cast(tuple[int, int], state["at"]), True


@pytest.mark.parametrize("delivered", [2, 3])
def test_a_pass_that_a_framework_does_not_finish_after_a_recovery_is_over_when_it_begins_the_next(delivered: int) -> None:
    """It knows that the pass has ended, or ends it, without asking for a further batch: the loader has to learn of it."""
    loader = Told()
    cursor = adopted(loader)
    assert isinstance(cursor, PassCursor)
    steps = iter(loader)
    for _ in range(delivered):
        next(steps)
    recorded = cursor.state()
    for _ in range(2):
        cursor.load(recorded)
        cursor.again()
        assert list(loader) == [(1, 1), (1, 2), (1, 3)]


def test_a_replaced_iterator_must_not_be_used() -> None:
    run = Run(LOADERS["shuffle"])
    first = iter(run.loader)
    next(first)
    second = iter(run.loader)
    next(second)
    with pytest.raises(UsageError, match="'loader': an older iterator"):
        next(first)


def test_a_pass_moves_the_global_generators_by_one_draw() -> None:
    loader = batches(range(ITEMS), sampler=Unruly())
    adopted(loader)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    expected = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"], torch.get_rng_state()
    torch.manual_seed(3)
    assert len(list(loader)) == 4
    assert random.getstate() == expected[0]
    assert np.random.get_state(legacy=False)["state"]["pos"] == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])


def test_own_generator_gives_the_order_that_torch_gives() -> None:
    plain = [b[:, 0].tolist() for _ in range(2) for b in LOADERS["sampler_generator"]()]
    loader = LOADERS["sampler_generator"]()
    adopted(loader)
    assert [b[:, 0].tolist() for b in loader] == plain[: len(plain) // 2]


def test_worker_init_fn_and_worker_info_are_the_users() -> None:
    def dataset() -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.dataset

    def init(worker: int) -> None:
        assert type(dataset()) is Noisy
        dataset().worker = worker

    def collate(items: list[torch.Tensor]) -> int:
        number: int = dataset().worker
        return number

    loader = batches(Noisy(), num_workers=2, worker_init_fn=init, collate_fn=collate)
    adopted(loader)
    assert list(loader) == [0, 1, 0, 1]


class Slow(Dataset[int]):
    """Half a second an item."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5)
        return index


def test_quiesce_does_not_wait_for_workers_and_leaves_none() -> None:
    loader = DataLoader(Slow(), batch_size=2, num_workers=2)
    cursor = adopted(loader)
    steps = iter(loader)
    time.sleep(0.1)
    before = time.monotonic()
    cursor.quiesce()
    assert time.monotonic() - before < 0.1
    deadline = before + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []
    del steps


def test_state_is_cheap() -> None:
    loader = LOADERS["generator"]()
    cursor = adopted(loader)
    steps = iter(loader)
    next(steps)
    rounds = 2000
    before = time.perf_counter()
    for _ in range(rounds):
        cursor.state()
    assert (time.perf_counter() - before) / rounds < 30e-6


def test_release_gives_the_class_back() -> None:
    loader = LOADERS["shuffle"]()
    cursor = adopted(loader)
    assert isinstance(loader, DataLoader)
    assert type(loader) is not DataLoader
    with pytest.raises(UsageError, match="protected already"):
        adopt("again", loader, on_delivery=lambda: None)
    cursor.release()
    assert type(loader) is DataLoader
    assert len(list(loader)) == 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


class Custom(DataLoader[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Stream()), "StatefulDataLoader"),
        (lambda: Custom(Noisy()), "Custom overrides __iter__"),
        (lambda: DataLoader(Noisy(), num_workers=1, in_order=False), "in_order=False"),
    ],
    ids=["iterable", "subclass", "out_of_order"],
)
def test_loaders_without_a_position_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(UsageError, match=rf"protect\(train=...\).*{reason}"):
        adopt("train", make(), on_delivery=lambda: None)


class Counting:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.at, self.epoch, self.asked = 0, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 5:
            self.at += 1
            yield torch.tensor([self.epoch, self.at])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def test_loader_with_its_own_state() -> None:
    all_points(Counting)


def test_state_of_such_a_loader_is_asked_for_once_a_batch() -> None:
    loader = Counting()
    cursor = adopted(loader)
    next(iter(loader))
    for _ in range(5):
        cursor.state()
    assert loader.asked == 1


class Eager:
    """Opens a pass when it is asked for its position, in the order of the epoch that it has then, as StatefulDataLoader does."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0
        self.opened: list[tuple[int, int]] | None = None

    def _open(self) -> list[tuple[int, int]]:
        if self.opened is None:
            self.opened = [(self.epoch, number) for number in range(self.at, 5)]
        return self.opened

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in self._open():
            self.at += 1
            yield torch.tensor(place)

    def state_dict(self) -> dict[str, int]:
        self._open()
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.opened = state["at"], None


def test_the_position_is_asked_for_before_the_first_pass_without_fixing_its_order() -> None:
    loader = Eager()
    loader.load_state_dict({"at": 3})
    cursor = adopted(loader)
    told = cursor.state()
    loader.epoch = 7
    assert next(iter(loader)).tolist() == [7, 3]
    cursor.load(told)
    cursor.state()
    loader.epoch = 8
    assert next(iter(loader)).tolist() == [8, 3]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda g: torch.rand(3, generator=g).tolist()),
        (np.random.default_rng(1), lambda g: g.random(3).tolist()),
        (np.random.Generator(np.random.MT19937(1)), lambda g: g.random(3).tolist()),
        (np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
        (random.Random(1), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    ],
    ids=["torch", "numpy", "numpy_mt", "numpy_legacy", "python"],
)
def test_generators_return_to_their_state(generator: object, draw: Callable[[object], list[float]]) -> None:
    cursor = adopted(generator)
    draw(generator)
    state = codec.encode(cursor.state())
    expected = draw(generator)
    draw(generator)
    cursor.load(codec.decode(state))
    assert draw(generator) == expected


@pytest.mark.parametrize("obj", [torch.nn.Sequential(torch.nn.Linear(1, 1)), [1, 2], {}, 3, object()])
def test_other_things_are_not_adopted(obj: object) -> None:
    assert adopt("x", obj, on_delivery=lambda: None) is None
