"""Learns to write Python on fully_shard (HSDP), unprotected: `torchrun --nproc-per-node 4 examples/train_fsdp_plain.py`."""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

STEPS, LENGTH, WIDTH, LAYERS, BATCH, RATE = int(os.environ.get("STEPS", "100")), 32, 64, 3, 8, 1e-2


class Layer(nn.Module):
    """Each byte sees the one before it, then a small network works on both."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.drop(self.down(F.gelu(self.up(torch.cat([y, F.pad(y, (0, 0, 1, -1))], dim=-1)))))


def pieces():
    """Consecutive pieces of Python's own source files, as bytes; each row has one byte more, to be foretold."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return rows[: len(rows) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(1234)

data = pieces()
loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=1), drop_last=True)
model = nn.Sequential(nn.Embedding(256, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 256)).to(device)
mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS + 1)


def train():
    step = 0
    while step < STEPS:
        for rows in loader:
            x, y = rows[:, :-1].long().to(device), rows[:, 1:].long().to(device)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0 and step % 10 == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
            if step == STEPS:
                return


train()
dist.destroy_process_group()
