"""What Lightning's ModelCheckpoint wrote, newest first: found, held against damage, and read without unpickling anything."""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from instep_lightning import sharded, zipped
from instep_lightning.flavour import Foreign, fabric, part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def savers(trainer: "Trainer") -> list[Foreign]:
    """The callbacks whose checkpoints a training can go on from. None with a plugin that has a format of its own."""
    module, io = part(trainer, "callbacks"), trainer.strategy.checkpoint_io
    inner = getattr(io, "_checkpoint_io", None) or io  # of a wrapper such as AsyncCheckpointIO
    if type(inner).__name__ != "TorchCheckpointIO":
        return []
    return [c for c in trainer.callbacks if isinstance(c, module.ModelCheckpoint) and not c.save_weights_only]


def newest(trainer: "Trainer") -> Iterator[str]:
    """Paths of whatever lies in the folders of these callbacks and is named as a checkpoint, the last written first."""
    found: dict[str, float] = {}
    for saver in savers(trainer):
        if not saver.dirpath:
            continue
        files, ending = _files(trainer, saver.dirpath), saver.FILE_EXTENSION
        for path in {*files.glob(f"{saver.dirpath}/*{ending}"), *files.glob(f"{saver.dirpath}/**/*{ending}")}:
            found[path if os.path.exists(path) else files.unstrip_protocol(path)] = files.modified(path).timestamp()
    yield from sorted(found, key=lambda path: (found[path], path), reverse=True)


def peek(trainer: "Trainer", path: str) -> Mapping[str, Foreign]:
    """What a checkpoint says about itself; its tensors stay where they are, if they are in a local file. Raises ``Unusable``."""
    told = sharded.about(path)
    return zipped.load(told) if os.path.isfile(told) else read(trainer, path)


def check(trainer: "Trainer", path: str, *, rank: int, ranks: int) -> None:
    """Hold what was written against its checksums: of a folder with parts each rank its share, of a file rank 0. Raises ``Unusable``."""
    if sharded.is_one(path):
        sharded.check(path, rank=rank, ranks=ranks)
    elif rank == 0:
        with _files(trainer, path).open(path, "rb") as file:
            zipped.intact(file)


def read(trainer: "Trainer", path: str) -> dict[str, Foreign]:
    """All of a checkpoint in one file, or what a folder with parts has beside them. Raises ``Unusable``."""
    try:
        with _files(trainer, path).open(sharded.about(path), "rb") as file:
            return zipped.load(file)
    except OSError as error:
        raise zipped.Unusable(f"is incomplete ({error})") from None


def _files(trainer: "Trainer", path: str) -> Foreign:
    return fabric(trainer, "utilities.cloud_io").get_filesystem(path)
