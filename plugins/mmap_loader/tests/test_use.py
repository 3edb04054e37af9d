"""Ways to use the loader: every kind of source through the cache, shared streams, and growth over many steps."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from test_order import Cyclic
from things import ByRank, Counting, Plain, Samples, filled, producer, take, vanish
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

import instep
from instep.errors import UsageError
from instep_mmap_loader import MmapLoader
from instep_mmap_loader.agree import agree
from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.order import At

Make = Callable[..., MmapLoader]
FULL = pytest.mark.full
pytestmark = pytest.mark.timeout(180)


class Worker(Samples):
    """Shows which process fetches."""

    def __getitem__(self, index: int) -> dict[str, object]:
        info = get_worker_info()
        assert info is not None
        return {"index": index, "count": info.num_workers, "pid": os.getpid(), "set": os.environ.get("SET")}


class Steady(Samples):
    """Draws nothing: random states of its own workers are the torchdata loader's business, which does not keep them."""

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"index": index}


def note(number: int) -> None:
    os.environ["SET"] = f"worker {number}"


KINDS: dict[str, tuple[object, dict[str, Any]]] = {
    "sampler": (Samples(31), {"sampler": DistributedSampler(cast("Dataset[Any]", range(31)), 2, 1), "num_workers": 2}),
    "cyclic": (Samples(50), {"batch_sampler": Cyclic(50, 18, 3, 1, 2), "batch_size": 1}),
    "whole samples": (Samples(5), {"batch_size": None}),
    "stateful": (Counting(21), {"drop_last": True}),
    "plain": (Plain(), {"batch_size": 7}),
    "empty": (Samples(0), {}),
}
EACH = [pytest.param(kind, marks=() if kind in ("sampler", "stateful") else FULL, id=kind) for kind in KINDS]


@pytest.mark.parametrize("kind", EACH)
def test_every_source_is_the_same_through_the_cache(make: Make, kind: str) -> None:
    """The random state outside is not touched."""
    data, options = KINDS[kind]
    before = torch.get_rng_state()
    loader = make(data, **options)
    expected = take(make(data, cache=False, **options))
    assert take(loader) == expected
    assert bool(expected) == (kind != "empty")
    assert torch.equal(torch.get_rng_state(), before)


@FULL
def test_ranks_of_one_stream_do_not_get_each_others_batches(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their data sets are equal but for the environment; after all were killed, whoever comes back first finds its own."""
    expected = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        expected[rank] = take(make(ByRank(), cache=False))
        killed = make(ByRank())
        filled(killed, 4)
        vanish(killed)
    assert expected["0"] != expected["1"]
    assert killed._next.sample == 0
    again = make(ByRank())
    assert again.ready() is not None
    assert take(again) == expected["1"]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_torchdatas_loader_keeps_its_own_order(make: Make) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def source() -> object:
        torch.manual_seed(3)  # its sampler is seeded when it is built
        return stateful.StatefulDataLoader(Steady(30), batch_size=4, shuffle=True, num_workers=1)

    expected = take(make(source(), 1, cache=False))
    loader = make(source(), 1)
    got = take(loader, 3)
    state = loader.state_dict()
    loader.close()
    again = make(source(), 1)
    again.load_state_dict(state)
    assert got + take(again) == expected


def test_workers_are_workers(make: Make) -> None:
    loader = make(Worker(40), num_workers=2, worker_init_fn=note)
    seen = [batch for batch in loader if isinstance(batch, dict)]
    assert {int(n) for batch in seen for n in batch["count"]} == {2}
    assert {word for batch in seen for word in batch["set"]} == {"worker 0", "worker 1"}
    assert os.getpid() not in {int(pid) for batch in seen for pid in batch["pid"]}


def test_ranks_that_share_a_stream_have_one_producer(make: Make) -> None:
    """The slower reader holds the window; both get all of it, through a lookback of nothing."""
    expected = take(make(Samples(), cache=False), epochs=1)
    first, second = (make(Samples(), readers=2, reader=number, prefetch=3, lookback=0) for number in (0, 1))
    assert producer(first) == producer(second)
    got = take(first, 3)
    assert take(second, 1) == expected[:1]
    thread = threading.Thread(target=lambda: got.extend(take(first, epochs=1)))
    thread.start()
    assert take(second, epochs=1) == expected[1:]
    thread.join(60)
    assert got == expected
    first.close()
    assert len(take(second, 12, epochs=2)) == 12, "a reader that left holds nobody up"
    with pytest.raises(LoaderError, match=r"reader 1 .* is in use by a living process"):
        make(Samples(), readers=2, reader=1, prefetch=3, lookback=0)


def test_readers_must_stand_at_one_place() -> None:
    """Two real gloo ranks in two threads agree on the fewest ready batches, and both hear of different places."""
    store, results = torch._C._distributed_c10d.HashStore(), dict[str, object]()

    def rank(number: int) -> None:
        group = make_group(store, number)
        results[f"ready {number}"] = agree(group, At(1, 8), 5 + number)
        with pytest.raises(LoaderError, match="stand at different places"):
            agree(group, At(1, 8 + number), 5)
        results[f"told {number}"] = True

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"ready 0": 5, "ready 1": 5, "told 0": True, "told 1": True}


def make_group(store: torch._C._distributed_c10d.Store, number: int) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, number, 2)
    backend = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def test_the_session_adopts_it_without_an_agent(make: Make) -> None:
    """A plain session: the loop of every other script."""
    expected = take(make(Samples(), cache=False))
    loader = make(Samples())
    with pytest.warns(UserWarning, match="nothing is protected"):
        session = instep.init()
    session.protect(loader=loader)
    got = []

    @session.recoverable
    def train() -> None:
        from things import digest

        for _ in range(loader.epoch, 2):
            for batch in loader:
                got.append(digest(batch))
                with session.commit():
                    pass

    try:
        train()
    finally:
        dist.destroy_process_group()  # of this process, which other tests share
    assert got == expected


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sampler": range(3), "shuffle": True}, "exclude each other"),
        ({"batch_sampler": [[1]], "drop_last": True, "batch_size": 1}, "batch_sampler excludes"),
        ({"rank": 2, "world": 2}, "rank 2 of a world of 2"),
        ({"rank": 0}, "belong together"),
        ({"batch_size": 0}, "not positive"),
        ({"reader": 1}, "reader=1"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"name": "../x"}, "file name"),
        ({"directory": "/nowhere"}, "no directory"),
    ],
)
def test_wrong_arguments_are_named(make: Make, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        make(Samples(), **options)


def test_a_position_with_another_seed_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="seed=5"):
        make(Samples(), cache=False, seed=6).load_state_dict(make(Samples(), cache=False).state_dict())


@FULL
@pytest.mark.timeout(600)
def test_nothing_grows_over_ten_thousand_steps(make: Make) -> None:
    """Files, bytes, descriptors and memory of both processes."""
    loader = make(Samples(4000), shuffle=True, seed_samples=False)
    assert loader._cache is not None
    path = loader._cache.path

    def sizes() -> dict[str, int]:
        pid = producer(loader)
        memory = {name: int(Path(f"/proc/{p}/statm").read_text().split()[1]) for name, p in (("own", os.getpid()), ("its", pid))}
        descriptors = len(os.listdir("/proc/self/fd")) + len(os.listdir(f"/proc/{pid}/fd"))
        files = [p for p in path.iterdir() if not p.name.startswith("wake")]
        return {"files": len(files), "bytes": sum(p.stat().st_size for p in files), "descriptors": descriptors, **memory}

    take(loader, 500, epochs=11)
    filled(loader, 8)
    before = sizes()
    take(loader, 9500, epochs=11)
    filled(loader, 8)
    time.sleep(0.2)
    after = sizes()
    pages = {"own", "its"}
    assert {k: v for k, v in after.items() if k not in pages} == {k: v for k, v in before.items() if k not in pages}
    for name in pages:
        assert after[name] < before[name] + 2000, name
