"""Training data of NeMo's data modules through ``mmap_loader``, by configuration alone: its batches outlive the trainer.

NeMo deals samples out by Megatron's samplers, whose order follows from the samples consumed; so the stream is the one that the data
module's own loader gives. Ranks that hold parts of one model read the same micro-batches, and share them.
"""

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.utils.data import DataLoader

from instep.errors import UsageError
from instep_lightning.flavour import Foreign

if TYPE_CHECKING:
    from instep.session import Session

log = logging.getLogger(__name__)
_SAMPLERS = ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")


def mapped(loader: Foreign, session: "Session") -> Foreign:
    """The loader that stands in for a training loader, if the settings of the plugin ask for one; else the loader itself.

    Raises ``UsageError`` when `mmap_loader` is not enabled beside it.
    """
    plugin: Foreign = session.plugin("nemo")
    if plugin is None or not plugin.memory_mapped or not isinstance(loader, DataLoader):
        return loader
    if session.plugin("mmap_loader") is None:
        raise UsageError("plugins.nemo.memory_mapped = true needs the plugin that keeps the batches: set plugins.mmap_loader = true too")
    sampler = loader.batch_sampler
    if type(sampler).__name__ not in _SAMPLERS:
        log.warning("memory_mapped: the order of a %s is not known, the data module's own loader stays", type(sampler).__name__)
        return loader
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from instep_mmap_loader import MmapLoader

    alike, mine = _alike()
    return MmapLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        rank=parallel_state.get_data_parallel_rank(),
        world=parallel_state.get_data_parallel_world_size(),
        name="nemo" if alike > 1 or parallel_state.get_context_parallel_world_size() == 1 else f"nemo-{dist.get_rank()}",
        prefetch=plugin.prefetch * get_num_microbatches(),
        lookback=plugin.lookback * get_num_microbatches(),
        readers=alike,
        reader=mine,
    )


def rewind(loader: Foreign) -> None:
    """Lightning has begun a pass before the loader was protected; it begins anew, at the same place."""
    if hasattr(loader, "abandon"):  # an MmapLoader
        loader.load_state_dict(loader.state_dict())


def _alike() -> tuple[int, int]:
    """How many ranks read the same micro-batches, and which of them this one is. With context parallelism none is sure to be one."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() > 1:
        return 1, 0
    ranks = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    return len(ranks), ranks.index(dist.get_rank())
