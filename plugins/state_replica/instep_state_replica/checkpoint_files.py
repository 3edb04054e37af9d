"""A directory of checkpoints: a folder for each step, and in it each rank's part and its receipt. Imports no torch.

A part is a safetensors file, a receipt is JSON that tells what must be in the part; both appear whole, the receipt last. A checkpoint is
complete when the receipts of all ranks are there, are of one save, and the parts have their sizes. Nobody needs to be asked.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

_NAME = re.compile(r"step-(\d{10,})")
_NEW = ".new"
OF_SCRIPT = "of the script"
"""In place of a name: whatever the script's own function loads."""


class Unusable(Exception):  # noqa: N818 - an outcome of looking at a folder
    """A checkpoint cannot be loaded; the text says why, without its name."""


class Receipt(BaseModel):
    """What one rank put into its part. ``run`` is of the job, ``save`` of the ranks that saved together; ``digests`` are xxh3_64 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    run: str
    save: str
    step: int
    block: int
    world: int
    rank: int
    bytes: int
    digests: Mapping[str, str]

    def pack(self) -> str:
        """The text of the file, with a digest over the receipt itself."""
        body = self.model_dump_json()
        return json.dumps({"receipt": body, "digest": xxhash.xxh3_64_hexdigest(body.encode())})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and a receipt of each rank, in order."""

    folder: Path
    receipts: tuple[Receipt, ...]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def step(self) -> int:
        """Committed steps that it holds."""
        return self.receipts[0].step

    @property
    def block(self) -> int:
        """The block in which it was saved."""
        return self.receipts[0].block

    @property
    def run(self) -> str:
        """The job that saved it."""
        return self.receipts[0].run


def name(step: int) -> str:
    """The name of a checkpoint."""
    return f"step-{step:010d}"


def part(folder: Path, rank: int) -> Path:
    """Where a rank's tensors are."""
    return folder / f"rank-{rank:05d}.safetensors"


def receipt(folder: Path, rank: int) -> Path:
    """Where a rank's receipt is."""
    return folder / f"rank-{rank:05d}.json"


def unfinished(path: Path) -> Path:
    """Where a file is written before ``publish`` gives it its name."""
    return path.with_name(path.name + _NEW)


def publish(path: Path) -> None:
    """Give a file that was written to ``unfinished(path)`` its name, once the storage has it."""
    for place in (unfinished(path), None, path.parent):
        if place is None:
            unfinished(path).replace(path)
            continue
        fd = os.open(place, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read(folder: Path, world: int) -> Checkpoint:
    """The checkpoint in a folder, for a job of ``world`` ranks. Parts are looked at, not read.

    Raises:
        Unusable: it is incomplete, damaged, or of another number of ranks.
    """
    there = [rank for rank in range(world) if receipt(folder, rank).exists()]
    if lacking := sorted(set(range(world)) - set(there)):
        raise Unusable(f"incomplete, without the parts of ranks {lacking}" if there else "incomplete, without any part")
    found = tuple(_receipt(folder, rank) for rank in range(world))
    if odd := sorted({r.world for r in found} - {world}):
        raise Unusable(f"of a job of {odd[0]} ranks, not {world}")
    if len({(r.save, r.step, r.block) for r in found}) > 1 or name(found[0].step) != folder.name:
        raise Unusable("incomplete, with parts of several saves")
    for one in found:
        try:
            size = part(folder, one.rank).stat().st_size
        except OSError as error:
            raise Unusable(f"damaged: the part of rank {one.rank} cannot be found ({error.strerror})") from None
        if size != one.bytes:
            raise Unusable(f"damaged: the part of rank {one.rank} has {size} of {one.bytes} bytes")
    return Checkpoint(folder, found)


def usable(directory: Path, world: int, skipped: list[str], *, avoid: Mapping[str, str] = {}) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first; those passed over are named in ``skipped``. ``avoid`` tells why of those that must be."""
    for folder in folders(directory):
        try:
            if folder.name in avoid:
                raise Unusable(avoid[folder.name])
            yield read(folder, world)
        except Unusable as why:
            skipped.append(f"{folder.name} is {why}")


def folders(directory: Path) -> list[Path]:
    """The folders of all checkpoints, whatever their state, newest first."""
    try:
        found = [Path(entry.path) for entry in os.scandir(directory) if _NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda folder: int(folder.name.partition("-")[2]), reverse=True)


def tidy(directory: Path, rank: int) -> None:
    """Remove what a dead predecessor of this rank did not finish."""
    for folder in folders(directory):
        for path in (part(folder, rank), receipt(folder, rank)):
            with suppress(OSError):
                unfinished(path).unlink(missing_ok=True)


def prune(directory: Path, world: int, *, keep: int, but: Collection[str] = (), damaged: Collection[str] = ()) -> None:
    """Remove what is older than the newest ``keep`` complete checkpoints that are not known as damaged."""
    left = keep
    for folder in folders(directory):
        if left <= 0 and folder.name not in but:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with suppress(Unusable):
            read(folder, world)
            left -= folder.name not in damaged


def _receipt(folder: Path, rank: int) -> Receipt:
    path = receipt(folder, rank)
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        body, digest = outer["receipt"], outer["digest"]
        if xxhash.xxh3_64_hexdigest(body.encode()) != digest:
            raise ValueError("its digest differs")
        found = Receipt.model_validate_json(body)
        if found.rank != rank:
            raise ValueError(f"it is of rank {found.rank}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise Unusable(f"damaged: the receipt of rank {rank} cannot be read ({first})") from None
    return found
