"""``mmap_loader``: prefetched batches that outlive the trainer, told of commits, so that a roll-back finds its batches too."""

import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr

from instep.hooks import Job, Plugin, Recovery, hookimpl
from instep.model import Receipt
from instep_mmap_loader.folder import SHARED_MEMORY

if TYPE_CHECKING:
    from instep_mmap_loader.loader import MmapLoader

NAME = "mmap_loader"


class MmapLoaderPlugin(Plugin):
    """Sweeps what dead runs left, moves the loaders' committed cursor, and has the next batch in hand when training goes on."""

    HOOK_API: ClassVar[int] = 1

    directory: str = Field(default=SHARED_MEMORY, description="where the loaders of this job keep their batches")

    _loaders: Any = PrivateAttr(default_factory=weakref.WeakSet)

    def enlist(self, loader: "MmapLoader") -> None:
        """A loader was made in this process."""
        loader.follows = True
        self._loaders.add(loader)

    @hookimpl
    def start(self, job: Job) -> None:  # noqa: ARG002 - hooks have the names of their specification
        """Remove the batches of runs that no process belongs to any more."""
        from instep_mmap_loader.folder import sweep
        from instep_mmap_loader.place import run_name

        sweep(self.directory, own=run_name(None))

    @hookimpl
    def committed(self, step: int) -> None:  # noqa: ARG002
        """Batches delivered so far are final."""
        for loader in list(self._loaders):
            loader.committed()

    @hookimpl
    def resume_data(self, recovery: Recovery) -> Receipt | None:
        """Take the next batch out of the cache, if every loader's lies there."""
        began = time.monotonic()
        sizes = [loader.ready() for loader in list(self._loaders)]
        if not sizes or None in sizes:
            return None
        seconds = time.monotonic() - began
        return Receipt(phase="resume_data", plugin=NAME, rank=recovery.rank, seconds=seconds, bytes=sum(sizes), verified=True)

    @hookimpl
    def close(self) -> None:
        """End the producers, and remove their files."""
        for loader in list(self._loaders):
            loader.close()
