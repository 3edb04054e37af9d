"""``nemo``: what NeMo needs of the processes it runs in, before they import it."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from instep.hooks import Plugin, hookimpl

NAME = "nemo"


class Nemo(Plugin):
    """Keeps what NeMo imports from starting threads, so that the fork server can import it ahead of all ranks and their replacements."""

    HOOK_API: ClassVar[int] = 1
    memory_mapped: bool = Field(default=False, description="training data of data modules through mmap_loader, which is enabled beside it")
    prefetch: int = Field(default=4, ge=1, description="steps whose micro-batches lie ready ahead, if memory_mapped")
    lookback: int = Field(default=2, ge=1, description="steps whose micro-batches are kept for a roll-back, if memory_mapped")

    NEEDS: ClassVar[tuple[str, ...]] = ("nemo-toolkit", "megatron-core", "instep-state-replica")

    @hookimpl
    def environment(self) -> Mapping[str, str]:
        """Pyarrow's jemalloc, which Hugging Face's data sets bring in, has a thread of its own unless it is told not to."""
        return {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
