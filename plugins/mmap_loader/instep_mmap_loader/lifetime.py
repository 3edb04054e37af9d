"""When a loader's cache is given back: with the loader, at a clean end of the process, or by the plugin."""

import atexit
import os
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING

from instep_mmap_loader.cache import Cache
from instep_mmap_loader.folder import SHARED_MEMORY

if TYPE_CHECKING:
    from instep_mmap_loader.loader import MmapLoader
    from instep_mmap_loader.plugin import MmapLoaderPlugin


def close_with(loader: "MmapLoader", cache: Cache) -> "weakref.finalize[[Cache], MmapLoader]":
    """Close the cache when the loader is forgotten, or when the process ends well.

    After an uncaught exception the batches stay for the next start, until the producer's patience ends.
    """
    finalizer = weakref.finalize(loader, _leave, cache)
    finalizer.atexit = False
    atexit.register(_at_exit, weakref.ref(loader))
    os.register_at_fork(after_in_child=partial(_forked, weakref.ref(loader)))
    return finalizer


def enlist(loader: "MmapLoader") -> None:
    """Let the plugin, if it is enabled, tell this loader of commits."""
    plugin = _plugin()
    if plugin is not None:
        plugin.enlist(loader)


def default_directory() -> str:
    """Where caches lie: as the plugin is set, else in shared memory."""
    plugin = _plugin()
    return plugin.directory if plugin is not None else SHARED_MEMORY


def _plugin() -> "MmapLoaderPlugin | None":
    module = sys.modules.get("instep.session")
    session = module.current() if module is not None else None
    return session.plugin("mmap_loader") if session is not None else None


def _leave(cache: Cache) -> None:
    cache.close(remove=True)


def _forked(reference: "weakref.ref[MmapLoader]") -> None:
    loader = reference()
    if loader is not None:
        loader.abandon()


def _at_exit(reference: "weakref.ref[MmapLoader]") -> None:
    loader = reference()
    if loader is not None and not hasattr(sys, "last_value"):
        loader.close()
