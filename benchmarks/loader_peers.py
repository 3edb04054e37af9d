"""The first batch behind many others with loaders that keep none ready: those that are installed where this runs.

    python benchmarks/loader_peers.py
    /elsewhere/bin/python benchmarks/loader_peers.py

Prints one JSON object of milliseconds; nothing of instep is imported. ``DataLoader`` fetches and drops, as scripts do that can do no
better; ``StatefulDataLoader`` (torchdata) and ``StreamingDataLoader`` (mosaicml-streaming) take their state. Each has one worker process,
and data that costs 1 ms a sample; mosaicml's lies in shards instead. What is timed is building the loader, up to the batch.
"""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable

import torch
from loader_data import BATCHES, COST, KEYS, SAMPLES, Tokens, check
from torch.utils.data import DataLoader


def _fetch_and_drop(skip: int) -> object:
    steps = iter(DataLoader(Tokens(BATCHES, COST), SAMPLES, num_workers=1))  # type: ignore[arg-type]
    for _ in range(skip):
        next(steps)
    return next(steps)


def _stateful(skip: int) -> Callable[[], object]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    steps = iter(loader := StatefulDataLoader(Tokens(BATCHES, 0.0), SAMPLES, num_workers=1))
    for _ in range(skip):
        next(steps)
    state = loader.state_dict()

    def resume() -> object:
        again = StatefulDataLoader(Tokens(BATCHES, COST), SAMPLES, num_workers=1)
        again.load_state_dict(state)
        return next(iter(again))

    return resume


def _streaming(skip: int, directory: str) -> Callable[[], object]:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]

    data = Tokens(1, 0.0)
    with MDSWriter(out=directory, columns=dict.fromkeys(KEYS, "ndarray")) as out:
        for index in range((skip + 20) * SAMPLES):
            out.write({name: value.numpy() for name, value in data[index].items()})

    def loader() -> "StreamingDataLoader":
        return StreamingDataLoader(StreamingDataset(local=directory, batch_size=SAMPLES), batch_size=SAMPLES, num_workers=1)

    steps = iter(first := loader())
    for _ in range(skip):
        next(steps)
    state = first.state_dict()
    del steps, first

    def resume() -> object:
        again = loader()
        again.load_state_dict(state)
        return next(iter(again))

    return resume


def measure(skip: int) -> dict[str, float]:
    """Milliseconds to the batch behind ``skip`` others, by loader."""
    found: dict[str, float] = {}

    def timed(name: str, resume: Callable[[], object]) -> None:
        begin = time.perf_counter()
        batch = resume()
        found[f"{name}_ms_step_{skip}"] = 1e3 * (time.perf_counter() - begin)
        check(batch, skip=skip)

    if importlib.util.find_spec("streaming") is None:
        timed("fetch_and_drop", lambda: _fetch_and_drop(skip))
        if importlib.util.find_spec("torchdata") is not None:
            timed("stateful_dataloader", _stateful(skip))
        return found
    directory = tempfile.mkdtemp(prefix="bench-streaming-")
    try:
        timed("mosaicml_streaming", _streaming(skip, directory))
    finally:
        shutil.rmtree(directory)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(10) | measure(1000)))
