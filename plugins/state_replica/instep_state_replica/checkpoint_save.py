"""Saves this rank's part of a checkpoint: copied at the commit, digested and written in a thread, without any other rank."""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from instep.hooks import Holding
from instep.torch.digest import memory, plain
from instep.torch.overlay import names
from instep_state_replica import checkpoint_files as files

log = logging.getLogger(__name__)
_LOOK = 0.005
_NAMED = frozenset({
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
})  # fmt: skip
"""Types that every reader of safetensors knows; others are kept as bytes."""


class Saver:
    """Writes one part at a time. ``patience`` is in seconds: how long training waits for the part before. ``keep``: complete ones."""

    def __init__(self, directory: Path, run: str, *, rank: int, world: int, keep: int, patience: float) -> None:
        self._directory, self._run, self._rank, self._world = directory, run, rank, world
        self._keep, self._patience = keep, patience
        self._thread: threading.Thread | None = None
        self._cut = threading.Event()

    def save(self, holding: Holding, step: int, save: str, *, damaged: Collection[str] = ()) -> None:
        """Copy what this rank has to write of the state of ``step``, and begin to write it as part of ``save``.

        ``damaged``: names of those that are known to be, which do not count among the ones to keep.
        """
        self._cut.clear()
        if not self._idle(self._patience):
            log.warning(
                "checkpoint of step %d is left out: rank %d still writes the one before to %s; save less often, or to faster storage",
                *(step, self._rank, self._directory),
            )
            return
        tensors = staged(holding, step, self._rank)
        arguments = (tensors, holding.block, step, save, damaged)
        self._thread = threading.Thread(target=self._write, args=arguments, name="instep-checkpoint", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """A fault: training must not wait any longer. What is being written goes on. Callable from any thread."""
        self._cut.set()

    def close(self) -> None:
        """Wait for what is being written."""
        self._cut.clear()
        if not self._idle(self._patience):
            log.warning("a checkpoint was not written to its end within %g s", self._patience)

    def _idle(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (thread := self._thread) is not None and thread.is_alive():
            if self._cut.is_set() or time.monotonic() > until:
                return False
            thread.join(_LOOK)
        self._thread = None
        return True

    def _write(self, tensors: Mapping[str, Tensor], block: int, step: int, save: str, damaged: Collection[str]) -> None:
        folder, rank = self._directory / files.name(step), self._rank
        part, receipt = files.part(folder, rank), files.receipt(folder, rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            receipt.unlink(missing_ok=True)
            digests = {key: xxhash.xxh3_64_hexdigest(memory(tensor)) for key, tensor in tensors.items()}
            save_file(dict(tensors), files.unfinished(part), metadata={"format": "pt"})
            size = files.unfinished(part).stat().st_size
            files.publish(part)
            told = files.Receipt(
                run=self._run, save=save, step=step, block=block, world=self._world, rank=rank, bytes=size, digests=digests
            )
            files.unfinished(receipt).write_text(told.pack(), encoding="utf-8")
            files.publish(receipt)
            if rank == 0:
                files.prune(self._directory, self._world, keep=self._keep, but=(folder.name,), damaged=damaged)
        except Exception as error:  # noqa: BLE001 - whatever the storage raises: training goes on without this checkpoint
            log.error("checkpoint of step %d: rank %d could not save its part in %s: %s", step, rank, folder, error)
            for path in (part, receipt):
                with suppress(OSError):
                    files.unfinished(path).unlink(missing_ok=True)


def staged(holding: Holding, step: int, rank: int) -> dict[str, Tensor]:
    """Copies in host memory of what ``rank`` writes: its share of the tensors of each shard group, and its private state."""
    out = {f"record/{rank}": _bytes(holding.record(step))}
    for share in holding.shards():
        schema, tensors = share.describe()
        if rank == share.replicas[0]:
            out[f"{share.name}/schema"] = _bytes(schema)
        writers = writer_of([tensor.nbytes for tensor in tensors], share.replicas)
        for key, tensor, writer in zip(names(schema), tensors, writers, strict=True):
            if writer == rank:
                copy = plain(tensor).to("cpu", copy=True)
                out[f"{share.name}/{key}"] = copy if copy.dtype in _NAMED else copy.reshape(-1).view(torch.uint8)
    return out


def writer_of(sizes: Sequence[int], replicas: Sequence[int]) -> list[int]:
    """Which replica writes each tensor: the largest first, each to the one that has least to write; the same on all replicas."""
    load = dict.fromkeys(replicas, 0)
    out = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writer = min(load, key=lambda r: (load[r], r))
        load[writer] += sizes[index]
        out[index] = writer
    return out


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
