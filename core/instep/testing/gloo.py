"""A stock gloo process group over the ranks of a test's world, for whatever needs real collectives without a job."""

from datetime import timedelta
from typing import TYPE_CHECKING

from instep.testing.peer import Rank

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 60


def connect(me: Rank, file: str) -> None:
    """Make the default process group through a store in ``file``; call it on all ranks together."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    store = FileStore(file, me.size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=SECONDS))


def total(me: Rank, value: float) -> float:
    """The sum of ``value`` over all ranks: an all-reduce of one element."""
    import torch
    import torch.distributed as dist

    word: Tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word)
