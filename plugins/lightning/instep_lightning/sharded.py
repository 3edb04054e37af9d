"""Checkpoints in parts, as ``ModelParallelStrategy(save_distributed_checkpoint=True)`` writes them with torch.distributed.checkpoint.

torch reads what such a folder tells about its parts, and values that are no tensors, by unpickling. Here the classes of that description
are allowed and no others.
"""

import io
import os
import pickle  # noqa: TID251 - a reader that knows a few harmless classes, see above
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch.distributed.checkpoint import default_planner, filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from instep_lightning.flavour import Foreign
from instep_lightning.zipped import Unusable, intact

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ABOUT, _DESCRIPTION = "meta.pt", ".metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip


def is_one(path: str) -> bool:
    """Whether this is a folder, which may hold the parts of a checkpoint."""
    return os.path.isdir(path)


def about(path: str) -> str:
    """The file that tells what is no state of the model or of an optimizer: of a folder one of its own, else the file itself."""
    return str(Path(path) / _ABOUT) if is_one(path) else path


def check(path: str, *, rank: int, ranks: int) -> None:
    """All parts are as long as was written, and this rank's share of entries has its checksums. Raises ``Unusable``."""
    folder = Path(path)
    entries = sorted({(info.relative_path, info.offset, info.length) for info in _described(path).storage_data.values()})
    for number, (name, offset, length) in enumerate(entries):
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size < offset + length:
            raise Unusable(f"is damaged or incomplete: its part {name} has {size} bytes of at least {offset + length}")
        if number % ranks == rank:
            with (folder / name).open("rb") as part:
                part.seek(offset)
                intact(io.BytesIO(part.read(length)))


def load(trainer: "Trainer", path: str, checkpoint: Mapping[str, Foreign]) -> None:
    """Model and optimizers of a training with ModelParallelStrategy, from parts or from one whole file. Collective."""
    model, strict = trainer.strategy.model, trainer.lightning_module.strict_loading
    assert model is not None
    whole = states.StateDictOptions(full_state_dict=not is_one(path), strict=strict)
    if is_one(path):
        state = {"state_dict": states.get_model_state_dict(model)}
        _fill(state, path)
        model.load_state_dict(state["state_dict"], strict=strict)
    else:
        states.set_model_state_dict(model, checkpoint["state_dict"], options=whole)
    for index, optimizer in enumerate(trainer.strategy.optimizers):
        if is_one(path):
            part: dict[str, Foreign] = {f"optimizer_{index}": states.get_optimizer_state_dict(model, optimizer)}
            _fill(part, path)
            saved = part[f"optimizer_{index}"]
        else:
            saved = checkpoint["optimizer_states"][index]
            if isinstance(next(iter(saved["state"]), None), int):
                saved = FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, model)
        states.set_optimizer_state_dict(model, optimizer, optim_state_dict=saved, options=whole)


def _described(path: str) -> metadata.Metadata:
    """What a folder tells about its parts. Raises ``Unusable`` if it is damaged, or holds anything else."""
    try:
        with (Path(path) / _DESCRIPTION).open("rb") as file:
            told: object = _Description(file).load()
    except OSError as error:
        raise Unusable(f"is incomplete ({error})") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, KeyError, ValueError) as error:
        raise Unusable(f"is damaged, or was not written by torch ({_DESCRIPTION}: {error})") from None
    if not isinstance(told, metadata.Metadata):
        raise Unusable(f"was not written by torch ({_DESCRIPTION} holds a {type(told).__name__})")
    return told


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Foreign:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *_: Foreign, **__: Foreign) -> metadata.Metadata:
        told = _described(str(self.path))
        told.storage_meta = told.storage_meta or metadata.StorageMeta()
        told.storage_meta.load_id = self.load_id
        return told


class _Planner(default_planner.DefaultLoadPlanner):
    def load_bytes(self, read_item: Foreign, value: IO[bytes]) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # raises for what is not plain; what it gave is safe to load once more
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _fill(state: dict[str, Foreign], path: str) -> None:
    state_dict_loader.load(state, storage_reader=_Reader(path), planner=_Planner())
