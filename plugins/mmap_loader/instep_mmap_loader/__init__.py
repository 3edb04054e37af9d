"""Prefetched batches in shared memory: they outlive the trainer, and the stream of samples is exactly what it would have been."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep_mmap_loader.loader import MmapLoader

__all__ = ["MmapLoader"]


def __getattr__(name: str) -> object:
    """Import the loader when it is asked for: the producer's first process must start without torch."""
    if name == "MmapLoader":
        from instep_mmap_loader.loader import MmapLoader

        return MmapLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
