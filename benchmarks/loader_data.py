"""The data set of the loader benchmarks: batches of 18 samples of 8,192 tokens (three int64 and one float32 each), 4.13 MB."""

import time
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

SAMPLES, TOKENS = 18, 8192
KEYS = {"tokens": torch.int64, "labels": torch.int64, "positions": torch.int64, "weights": torch.float32}
ROWS = 64
BATCHES = 2000
COST = 0.001


class Tokens:
    """Rows of a small table, after as much work as ``cost`` seconds of a processor."""

    def __init__(self, batches: int, cost: float) -> None:
        self.size, self.cost = batches * SAMPLES, cost
        self.rows = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
        self.weights = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.cost:
            end = time.thread_time() + self.cost
            while time.thread_time() < end:
                pass
        row, weight = self.rows[index % ROWS], self.weights[index % ROWS]
        return {"tokens": row, "labels": row, "positions": row, "weights": weight}


class Broken(Tokens):
    """Raises at the first sample, and says when."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise ValueError(f"raised at <{time.monotonic()}>")


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples one after the other, from a source that cannot tell its position."""

    def __init__(self, batches: int, cost: float) -> None:
        self.table = Tokens(batches, cost)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(self.table)):
            yield self.table[index]


def check(batch: object, *, skip: int) -> None:
    """Raise ``AssertionError`` if this is not the batch behind ``skip`` others."""
    assert isinstance(batch, dict)
    assert int(batch["tokens"][0, 0]) == skip * SAMPLES % ROWS * TOKENS, f"a wrong batch at step {skip}"
