"""Where a loader's cache lies, and whether there is room for it."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from instep.errors import UsageError
from instep_mmap_loader.cache import Cache, Place
from instep_mmap_loader.errors import LoaderError, NoRoom
from instep_mmap_loader.folder import sweep, top
from instep_mmap_loader.process import agent
from instep_mmap_loader.recipe import Payload, Settings, WorkerInit, fingerprint, main_path
from instep_mmap_loader.room import room
from instep_mmap_loader.sources import MapSource, Source


@dataclass(frozen=True)
class Options:
    """The arguments of ``MmapLoader`` that speak of the cache."""

    name: str
    prefetch: int
    lookback: int
    workers: int
    directory: str
    capacity: int | None
    idle: float
    identity: str | None
    run: str | None
    readers: int
    reader: int
    shard: tuple[int, int]


def open_cache(
    source: Source, options: Options, init: WorkerInit | None, collate: object, allocate: Callable[[int], torch.Tensor]
) -> Cache | None:
    """The cache of a source; ``None``, with a warning, if there can be none.

    Raises:
        UsageError: the options are out of range, or there is less memory than ``capacity``.
        LoaderError: the directory is not to be trusted.
    """
    _check(options)
    try:
        payload = Payload(source, init)
    except LoaderError as error:
        warnings.warn(f"MmapLoader goes on without its cache, more slowly: {error}", stacklevel=4)
        return None
    run = run_name(options.run)
    sweep(options.directory, own=run)
    owner = agent()
    settings = Settings(
        folder="",
        name=f"{options.name}-{options.shard[0]}",
        fingerprint=_fingerprint(source, options, payload, init, collate),
        workers=1 if source.sequential else max(1, options.workers),
        readers=options.readers,
        prefetch=max(options.prefetch, 2 * options.workers),
        lookback=options.lookback,
        idle=options.idle,
        capacity=options.capacity,
        agent=owner.plain() if owner is not None else None,
        path=tuple(sys.path),
        main=main_path(),
    )
    place = Place(top(options.directory) / run, options.reader, settings)
    try:
        return Cache(place, payload, allocate)
    except (NoRoom, OSError) as error:
        warnings.warn(f"MmapLoader goes on without its cache, more slowly: {error}", stacklevel=4)
        return None


def run_name(given: str | None) -> str:
    """The name of the present run: what was given, else the job of the agent, else the script."""
    owner = agent()
    if given is not None:
        return f"run-{_digest(given)}"
    if owner is not None:
        return f"job-{owner.pid}-{owner.started}"
    return f"script-{_digest(repr((main_path(), Path.cwd())))}"


def _fingerprint(source: Source, options: Options, payload: Payload, init: WorkerInit | None, collate: object) -> str:
    code: list[object] = [thing for thing in (init, collate) if thing is not None]
    if isinstance(source, MapSource):
        code += [type(source.dataset), *([type(source.order.sampler)] if hasattr(source.order, "sampler") else [])]
        settings = [*options.shard, source.order.identity(), source.batched, source.seed, source.seed_samples]
    else:
        code.append(type(source.source))
        settings = [*options.shard, source.stride, source.seed]
    return fingerprint(options.identity if options.identity is not None else payload.digest(), settings=settings, code=code)


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _check(options: Options) -> None:
    if options.prefetch < 1 or options.lookback < 0:
        raise UsageError(f"MmapLoader: prefetch={options.prefetch} must be 1 at least, lookback={options.lookback} 0")
    if not 0 <= options.reader < options.readers:
        raise UsageError(f"MmapLoader: reader={options.reader} of readers={options.readers}")
    if not options.name or "/" in options.name or options.name.startswith("."):
        raise UsageError(f"MmapLoader: name={options.name!r} cannot be part of a file name")
    if not Path(options.directory).is_dir():
        raise UsageError(f"MmapLoader: directory={options.directory!r} is no directory")
    if options.capacity is not None and options.capacity > (there := room(options.directory)):
        raise UsageError(
            f"MmapLoader: capacity={options.capacity} bytes, but {options.directory} and the memory limit leave {there}; give less, "
            "or a larger shared memory (docker: --shm-size)"
        )
