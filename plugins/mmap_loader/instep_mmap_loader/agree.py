"""Ranks that read one stream agree on their place when a pass begins."""

import logging

import torch
import torch.distributed as dist

from instep_mmap_loader.errors import LoaderError
from instep_mmap_loader.order import At

log = logging.getLogger(__name__)


def agree(group: dist.ProcessGroup, at: At, valid: int) -> int:
    """The number of ready batches that all ranks of the group have. Raises ``LoaderError`` on all if their places differ."""
    cpu = torch.device("cpu")
    device = cpu if cpu in group._device_types else torch.device("cuda")
    own = torch.tensor([*at, valid], dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([rows], [own]).wait()
    told = [row.tolist() for row in rows]
    places = {rank: At(epoch, sample) for rank, (epoch, sample, _) in enumerate(told)}
    if len(set(places.values())) > 1:
        raise LoaderError(f"ranks that share a stream stand at different places, by rank in their group: {places}; load one state on all")
    common = min(row[2] for row in told)
    log.info("%d batches from epoch %d, sample %d on are ready on all ranks", common, *at)
    return int(common)
