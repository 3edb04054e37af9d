"""The first batch after the trainer was killed, in a new process and in one that goes on; and how long ``close()`` takes at any time."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings

import torch
from loader_cost import filled
from loader_data import BATCHES, COST, SAMPLES, Broken, Stream, Tokens, check

from instep_mmap_loader import MmapLoader
from instep_mmap_loader.errors import LoaderError

REPEATS = 5
_PATIENCE = 120


def _state(skip: int) -> dict[str, object]:
    return {"epoch": 0, "next_epoch": 0, "consumed": skip * SAMPLES, "seed": 0, "source": None}


def new_process(skip: int) -> float:
    """Milliseconds from building the loader to its first batch, beyond imports: the median over trainers each killed at that step."""
    _trainer(skip, die=True)  # it starts the producer, so its own first batch is not counted
    return 1e3 * statistics.median([*(_trainer(skip, die=True) for _ in range(REPEATS - 1)), _trainer(skip, die=False)])


def _trainer(skip: int, *, die: bool) -> float:
    command = [sys.executable, __file__, str(skip), *(["die"] if die else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=_PATIENCE)
    assert done.returncode == (-signal.SIGKILL if die else 0), f"the trainer ended with code {done.returncode}"
    return float(json.loads(done.stdout))


def same_process(skip: int) -> float:
    """Milliseconds from a roll-back to the batch that comes next, in a process that goes on: the median."""
    loader = MmapLoader(Tokens(BATCHES, COST), SAMPLES, name="in-process")
    state, seconds = _state(skip), []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        loader.load_state_dict(state)
        steps = iter(loader)
        check(next(steps), skip=skip)
        seconds.append(time.perf_counter() - begin)
        check(next(steps), skip=skip + 1)
        filled(loader)
    loader.close()
    return 1e3 * statistics.median(seconds[1:])


def raising() -> float:
    """Seconds from an exception of the data set to the same in the trainer that waits for the batch: the longest."""
    longest = 0.0
    loader = MmapLoader(Broken(BATCHES, 0.0), SAMPLES, name="raising")
    for _ in range(REPEATS):
        try:
            next(iter(loader))
        except LoaderError as error:
            longest = max(longest, time.monotonic() - float(str(error).rpartition("<")[2].partition(">")[0]))
        loader.load_state_dict(_state(0))
    loader.close()
    return longest


def closing() -> float:
    """The longest of ``close()`` in seconds: at once, at the start, while the producer fetches and drops on its way, and when it rests."""
    longest = 0.0
    for seconds, skip in ((0.0, 0), (0.2, 0), (3.0, 1900), (6.0, 1900)):
        loader = MmapLoader(Stream(BATCHES, COST), SAMPLES, name="closing")
        with warnings.catch_warnings(action="ignore"):  # that it has to fetch and drop
            loader.load_state_dict(_state(skip))
        iter(loader)
        time.sleep(seconds)
        longest = max(longest, _closed(loader))
    loader = MmapLoader(Tokens(BATCHES, COST), SAMPLES, name="closing")
    filled(loader)
    return max(longest, _closed(loader))


def _closed(loader: MmapLoader) -> float:
    assert loader._cache is not None
    path = loader._cache.path
    begin = time.perf_counter()
    loader.close()
    seconds = time.perf_counter() - begin
    assert not path.exists()
    return seconds


def main() -> None:
    """Be a trainer: print the seconds to the first batch, and be killed if told so."""
    skip, die = int(sys.argv[1]), sys.argv[2:] == ["die"]
    torch.set_num_threads(1)
    data = Tokens(BATCHES, COST)
    begin = time.perf_counter()
    loader = MmapLoader(data, SAMPLES, name="restart")
    loader.load_state_dict(_state(skip))
    batch = next(iter(loader))
    seconds = time.perf_counter() - begin
    check(batch, skip=skip)
    print(json.dumps(seconds), flush=True)
    if die:
        loader.load_state_dict(_state(skip))
        iter(loader)
        filled(loader)
        os.kill(os.getpid(), signal.SIGKILL)
    loader.close()


if __name__ == "__main__":
    main()
