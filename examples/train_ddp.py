"""DDP training that survives the death of any rank: `instep run --nproc-per-node 4 examples/train_ddp.py`."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep

EPOCHS = 5

session = instep.init()  # joins the job and makes the process group

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
data = TensorDataset(inputs, (inputs @ torch.randn(32, 8)).argmax(dim=1))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DDP(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


@session.recoverable
def train() -> None:
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:  # after a fault: called again, goes on with the right batch
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            with session.commit():  # the one place where step s becomes s+1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if session.step % 20 == 0 and session.rank == 0:
                print(f"step {session.step:4d}  loss {loss.item():.4f}", flush=True)


train()
