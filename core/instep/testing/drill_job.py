"""The small job that ``instep drill`` runs when no script is given: it has one of everything that a recovery must bring back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep


def network() -> nn.Module:
    """Three blocks with buffers and random draws, so that private state matters."""
    blocks = [layer for _ in range(3) for layer in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(16, 48), *blocks, nn.Linear(48, 4))


def data() -> TensorDataset:
    """Points and the class of each, always the same ones."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=random)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def main() -> None:
    """Train until the drill ends the block."""
    session = instep.init()
    torch.manual_seed(0)
    samples = data()
    loader = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples))
    device = torch.device("cpu") if dist.get_backend() == "instep" else session.device
    model = DistributedDataParallel(network().to(device), bucket_cap_mb=0.02)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    @session.recoverable
    def train() -> None:
        while True:
            for x, y in loader:
                nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
                with session.commit():
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    train()


if __name__ == "__main__":
    main()
