"""What the memory-mapped batch cache costs, and what it saves: ratios within one run, exit code 0 only if every bar holds.

    python benchmarks/loader.py --json

Batches are 18 samples of 8,192 tokens (three int64 and one float32 each), 4.13 MB. Put and get are compared with a copy of as many bytes
between memory that no cache holds, throughput with ``DataLoader`` and as many workers. Single times are the best of five. ``--peers`` adds
the first batch after a restart with skipping in ``DataLoader`` and, where they are installed, with ``StatefulDataLoader`` and
mosaicml-streaming: minutes, most of it skipping.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

SAMPLES, TOKENS = 18, 8192
ROTATION = 24
REPEATS = 5
KEYS = {"tokens": torch.int64, "labels": torch.int64, "positions": torch.int64, "weights": torch.float32}
BARS = {
    "put_over_copy": (2.5, "most"),
    "get_over_copy": (2.0, "most"),
    "throughput_free": (0.85, "least"),
    "throughput_1ms": (0.95, "least"),
    "restart_ms_step_10": (20.0, "most"),
    "restart_ms_step_1000": (20.0, "most"),
    "in_process_ms_step_10": (10.0, "most"),
    "in_process_ms_step_1000": (10.0, "most"),
    "close_s": (1.0, "most"),
}


class Tokens:
    """Rows of a small table, after as much work as ``cost`` seconds of a processor."""

    def __init__(self, batches: int, cost: float) -> None:
        self.size, self.cost = batches * SAMPLES, cost
        self.rows = torch.arange(64 * TOKENS).reshape(64, TOKENS)
        self.weights = torch.rand(64, TOKENS, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.cost:
            end = time.thread_time() + self.cost
            while time.thread_time() < end:
                pass
        row, weight = self.rows[index % 64], self.weights[index % 64]
        return {"tokens": row, "labels": row, "positions": row, "weights": weight}


def copies(rounds: int) -> dict[str, float]:
    """Put and get, each next to a copy of as many bytes, in milliseconds."""
    from instep_mmap_loader.files import Mapped, Pool, record_name
    from instep_mmap_loader.folder import Folder, top
    from instep_mmap_loader.order import At
    from instep_mmap_loader.record import Label, draft, read, write

    batches = [{k: torch.ones(SAMPLES, TOKENS, dtype=t) * i for k, t in KEYS.items()} for i in range(ROTATION)]
    size = sum(t.nbytes for t in batches[0].values())
    buffers = [np.ones(size, np.uint8) for _ in range(2 * ROTATION)]
    times: dict[str, list[float]] = {"copy": [], "put": [], "get": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
        folder = Folder.make(top(directory) / "run" / "bench.0")
        pool, mapped, reading = Pool(folder, slots=ROTATION, capacity=None), Mapped(folder, writable=True), Mapped(folder, writable=False)
        for turn in range(rounds * ROTATION):
            number, at = turn % ROTATION, At(0, turn)
            warm = turn >= 2 * ROTATION

            begin = time.perf_counter()
            np.copyto(buffers[number], buffers[ROTATION + number])
            copied = time.perf_counter()
            slot = pool.take(set())
            assert slot is not None
            record = draft(Label("batch", at, At(0, turn + 1), "f", 0), batches[number])
            view = mapped.view(slot, needs=record.needs, limit=1 << 30)
            write(record, view)
            os.rename(slot, record_name(at), src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            pool.done(at, At(0, turn + 1), slot=slot, size=len(view))
            put = time.perf_counter()
            if warm:
                times["copy"].append(copied - begin)
                times["put"].append(put - copied)
                old = At(0, turn - ROTATION + 2)
                begin = time.perf_counter()
                read(reading.view(record_name(old)), fingerprint="f")
                times["get"].append(time.perf_counter() - begin)
        folder.close()
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return {
        "copy_ms": medians["copy"],
        "put_ms": medians["put"],
        "get_ms": medians["get"],
        "put_over_copy": medians["put"] / medians["copy"],
        "get_over_copy": medians["get"] / medians["copy"],
    }


def throughput(cost: float, *, workers: int, batches: int, rounds: int) -> float:
    """Batches a second through the cache, over those through ``DataLoader``; the two take turns."""
    from instep_mmap_loader import MmapLoader

    data = Tokens(100_000, cost)
    ours = MmapLoader(data, SAMPLES, num_workers=workers, name="throughput")
    theirs = DataLoader(data, SAMPLES, num_workers=workers, persistent_workers=False)  # type: ignore[arg-type]

    def timed(steps: Iterator[object]) -> float:
        for _ in range(10):
            next(steps)
        begin = time.perf_counter()
        for _ in range(batches):
            next(steps)
        return (time.perf_counter() - begin) / batches

    ratios = []
    for _ in range(rounds):
        steps = iter(theirs)
        plain = timed(steps)
        del steps
        mine = timed(iter(ours))
        ratios.append(plain / mine)
        pause(ours)
    ours.close()
    return statistics.median(ratios)


def pause(loader: object) -> None:
    """Let the producer fill its window, so that it does not work while the other loader is measured."""
    from instep_mmap_loader import MmapLoader

    assert isinstance(loader, MmapLoader)
    assert loader._cache is not None
    while loader._cache.valid(loader._next, 8) < 8:
        time.sleep(0.02)


def trainer(args: argparse.Namespace) -> None:
    """A process that is killed, or that comes after one: it prints the seconds to its first batch beyond imports."""
    from instep_mmap_loader import MmapLoader

    data = Tokens(2000, 0.001)
    state = {"epoch": 0, "next_epoch": 0, "consumed": args.skip * SAMPLES, "seed": 0, "source": None}
    begin = time.perf_counter()
    loader = MmapLoader(data, SAMPLES, name="restart")
    loader.load_state_dict(state)
    batch = next(iter(loader))
    seconds = time.perf_counter() - begin
    assert isinstance(batch, dict)
    assert int(batch["tokens"][0, 0]) == (args.skip * SAMPLES) % 64 * TOKENS
    print(json.dumps(seconds), flush=True)
    if args.die:
        loader.load_state_dict(state)
        loader._stand()
        pause(loader)
        os.kill(os.getpid(), signal.SIGKILL)
    loader.close()


def restart(skip: int) -> dict[str, float]:
    """Milliseconds to the first batch after the trainer was killed at a step, in a new process and in a process that goes on."""
    from instep_mmap_loader import MmapLoader

    command = [sys.executable, __file__, "--trainer", "--skip", str(skip)]
    subprocess.run([*command, "--die"], stdout=subprocess.DEVNULL, check=False)
    killed = [subprocess.run([*command, "--die"], stdout=subprocess.PIPE, text=True, check=False).stdout for _ in range(REPEATS - 1)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    loader = MmapLoader(Tokens(2000, 0.001), SAMPLES, name="in-process")
    state = {**loader.state_dict(), "consumed": skip * SAMPLES}
    loader.load_state_dict(state)
    steps = iter(loader)
    taken = [next(steps) for _ in range(2)]
    pause(loader)
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        loader.load_state_dict(state)
        again = next(iter(loader))
        seconds.append(time.perf_counter() - begin)
        assert isinstance(again, dict)
        assert torch.equal(again["tokens"], taken[0]["tokens"])  # type: ignore[index]
    begin = time.perf_counter()
    loader.close()
    return {
        f"restart_ms_step_{skip}": 1e3 * min(map(float, [*killed, done])),
        f"in_process_ms_step_{skip}": 1e3 * min(seconds),
        "close_s": time.perf_counter() - begin,
    }


def peers(skip: int) -> dict[str, float]:
    """Milliseconds to the batch behind ``skip`` others, without a cache: what people do today."""
    data = Tokens(2000, 0.001)
    found: dict[str, float] = {}

    def timed(name: str, first: Callable[[], object]) -> None:
        begin = time.perf_counter()
        first()
        found[f"{name}_ms_step_{skip}"] = 1e3 * (time.perf_counter() - begin)

    def fetch_and_drop() -> None:
        steps = iter(DataLoader(data, SAMPLES, num_workers=1))  # type: ignore[arg-type]
        for _ in range(skip + 1):
            next(steps)

    timed("fetch_and_drop", fetch_and_drop)
    if importlib.util.find_spec("torchdata") is not None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(data, SAMPLES, num_workers=1)
        steps = iter(loader)
        for _ in range(skip):
            next(steps)
        state = loader.state_dict()
        del steps

        def resume() -> None:
            again = StatefulDataLoader(data, SAMPLES, num_workers=1)
            again.load_state_dict(state)
            next(iter(again))

        timed("stateful_dataloader", resume)
    if importlib.util.find_spec("streaming") is not None:
        timed("mosaicml_streaming", _streaming(skip))
    return found


def _streaming(skip: int) -> Callable[[], object]:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]

    directory = tempfile.mkdtemp(prefix="bench-streaming-")
    columns = dict.fromkeys(KEYS, "ndarray")
    data = Tokens(1, 0.0)
    with MDSWriter(out=directory, columns=columns) as out:
        for index in range((skip + 20) * SAMPLES):
            out.write({name: value.numpy() for name, value in data[index].items()})
    first = StreamingDataLoader(StreamingDataset(local=directory, batch_size=SAMPLES), batch_size=SAMPLES, num_workers=1)
    for _, _ in zip(range(skip), first, strict=False):
        pass
    state = first.state_dict()

    def resume() -> None:
        again = StreamingDataLoader(StreamingDataset(local=directory, batch_size=SAMPLES), batch_size=SAMPLES, num_workers=1)
        again.load_state_dict(state)
        next(iter(again))

    return resume


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1, help="worker processes on both sides")
    parser.add_argument("--peers", action="store_true", help="measure other loaders too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--die", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.trainer:
        trainer(args)
        return
    result = copies(args.rounds)
    result["throughput_free"] = throughput(0.0, workers=args.workers, batches=100, rounds=args.rounds // 2)
    result["throughput_1ms"] = throughput(0.001, workers=args.workers, batches=30, rounds=args.rounds // 2)
    closing = []
    for skip in (10, 1000):
        measured = restart(skip)
        closing.append(measured.pop("close_s"))
        result |= measured
    result["close_s"] = max(closing)
    if args.peers:
        for skip in (10, 1000):
            result |= peers(skip)
    missed = [name for name, (bar, kind) in BARS.items() if (result[name] > bar if kind == "most" else result[name] < bar)]
    if args.json:
        print(json.dumps({**result, "bars": {k: list(v) for k, v in BARS.items()}, "missed": missed, "ok": not missed}))
    else:
        for name, value in result.items():
            bar = f"   at {BARS[name][1]} {BARS[name][0]:g}" if name in BARS else ""
            print(f"{name:34s} {value:10.3f}{bar}{'   MISSED' if name in missed else ''}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
