"""The job of ``check_torch.py``: plain groups and a gloo one, messages that torch coalesces, state that depends on every step."""

import torch
import torch.distributed as dist

import instep

session = instep.init()
size, rank = session.world_size, session.rank
device = torch.device("cuda", 0)
weights = torch.zeros(4)
session.protect(weights=weights)
assert type(dist.group.WORLD) is dist.ProcessGroup
ends = dist.new_group([0, size - 1], backend="nccl")
gloo = dist.new_group(backend="gloo")


@session.recoverable
def train() -> None:
    while True:
        sent, got = torch.empty(4, device=device), torch.empty(4, device=device)
        dist.all_reduce(sent)
        if rank in (0, size - 1):
            dist.all_reduce(sent, group=ends)
        ops = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        gradient = torch.full((4,), float(rank))
        dist.all_reduce(gradient, group=gloo)
        with session.commit():
            weights.add_(gradient * (session.step + 1))


train()
