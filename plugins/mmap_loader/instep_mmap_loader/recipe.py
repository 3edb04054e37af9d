"""What the producer needs to make batches: handed to it once, as a pickle in nameless memory that only this child process inherits.

That is how ``multiprocessing`` hands objects to a spawned child. Batches and everything in files or pipes stay free of pickles.
"""

import hashlib
import importlib
import io
import json
import multiprocessing
import os
import pickle  # noqa: TID251 - objects for a child process of our own, through inherited memory, as multiprocessing does
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Self

import torch
import xxhash

from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.record import FORMAT
from instep_mmap_loader.sources import Source

WorkerInit = Callable[[int], None]
_ALIGN = 64


@dataclass(frozen=True)
class Settings:
    """What the producer is told in JSON. Times in seconds, ``capacity`` in bytes."""

    folder: str
    name: str
    fingerprint: str
    workers: int
    readers: int
    prefetch: int
    lookback: int
    idle: float
    capacity: int | None
    agent: Mapping[str, object] | None
    path: Sequence[str]
    main: str | None

    def json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read it back."""
        return cls(**json.loads(text))


class Payload:
    """The pickle, and beside it the large memory blocks that it refers to: they are hashed and written without a copy."""

    def __init__(self, source: Source, init: WorkerInit | None) -> None:
        """Raises ``LoaderError`` naming what cannot be pickled."""
        out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(out, protocol=5, buffer_callback=buffers.append).dump((source, init))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise LoaderError(f"the data set, sampler or collate_fn cannot be sent to the producer process: {error}") from error
        self._parts = [memoryview(out.getbuffer()), *(buffer.raw() for buffer in buffers)]

    def digest(self) -> str:
        """A digest of all of it."""
        digest = xxhash.xxh3_128()
        for part in self._parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()

    def write(self, file: BinaryIO) -> None:
        """Sizes, then all parts, aligned."""
        file.write(_head([len(part) for part in self._parts]))
        for part in self._parts:
            file.write(part)
            file.write(bytes(-len(part) % _ALIGN))


def load(data: memoryview, main: str | None) -> tuple[Source, WorkerInit | None]:
    """In the producer: the objects. A script's own classes are found by importing the script, without its ``__main__`` part."""
    count = int.from_bytes(data[:8], "little")
    sizes = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    at, parts = len(_head(sizes)), []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size + -size % _ALIGN
    source, init = _Unpickler(io.BytesIO(parts[0]), main, parts[1:]).load()
    return source, init


def _head(sizes: Sequence[int]) -> bytes:
    head = b"".join(number.to_bytes(8, "little") for number in (len(sizes), *sizes))
    return head.ljust(len(head) + -len(head) % _ALIGN, b"\0")


def importing() -> bool:
    """Whether this process is a producer that imports the user's script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def fingerprint(digest: str, *, settings: object, code: Sequence[object]) -> str:
    """What makes two caches the same: format, order and settings, the data set's content or given identity, and the code's files."""
    stamps = sorted({stamp for thing in code if (stamp := _stamp(thing)) is not None})
    return hashlib.sha256(json.dumps([FORMAT, torch.__version__, digest, settings, stamps]).encode()).hexdigest()[:32]


def main_path() -> str | None:
    """The script of this process, if it has one."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and Path(path).is_file() else None


class _Pickler(pickle.Pickler):
    """Plain tensors as their bytes: torch's own way writes addresses, which differ in each process, and shared memory."""

    def reducer_override(self, obj: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided and obj.is_leaf and not obj.is_quantized:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            data = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
            return _tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.requires_grad)
        return NotImplemented  # type: ignore[no-any-return]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, main: str | None, buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._main = main
        self._module: ModuleType | None = None

    def find_class(self, module: str, name: str) -> object:
        if module in ("__main__", "__mp_main__"):
            found: object = self._import_main()
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return super().find_class(module, name)

    def _import_main(self) -> ModuleType:
        if self._module is None:
            if self._main is None:
                raise LoaderError("a class or function is defined in the console; put it into a module")
            process = multiprocessing.current_process()
            process._inheriting = True  # type: ignore[attr-defined]
            try:
                content = runpy.run_path(self._main, run_name="__mp_main__")
            finally:
                del process._inheriting  # type: ignore[attr-defined]
            self._module = ModuleType("__mp_main__")
            self._module.__dict__.update(content)
            sys.modules["__main__"] = sys.modules["__mp_main__"] = self._module
        return self._module


def _tensor(data: "bytes | memoryview", dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    kind = getattr(torch, dtype)
    out = torch.frombuffer(data, dtype=kind).reshape(shape) if len(data) else torch.empty(shape, dtype=kind)
    return out.requires_grad_(requires_grad)


def _stamp(thing: object) -> str | None:
    """File, size and time of the module that defines a class or function."""
    name = getattr(thing, "__module__", None) or type(thing).__module__
    file = getattr(sys.modules.get(name) or importlib.import_module(name), "__file__", None)
    if not isinstance(file, str):
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return f"{file} {status.st_size} {status.st_mtime_ns}"
