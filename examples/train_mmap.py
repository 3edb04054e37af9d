"""DDP training whose next batch is in shared memory when a killed rank comes back.

    INSTEP_PLUGINS__MMAP_LOADER=true instep run --nproc-per-node 2 examples/train_mmap.py
    INSTEP_PLUGINS__MMAP_LOADER=true instep drill --ranks 2 --kill 1@9 examples/train_mmap.py

The data set is slow and random: each sample costs milliseconds, and is augmented by draws that follow from seed, epoch and index.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import instep
from instep_mmap_loader import MmapLoader


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy waves and their class."""

    def __init__(self, size: int, cost: float) -> None:
        self.size, self.cost = size, cost

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.cost)
        label = index % 4
        wave = torch.sin(torch.linspace(0, 3 * (label + 1), 64) + torch.rand(1))
        return wave + 0.3 * torch.randn(64), torch.tensor(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cost", type=float, default=0.001, help="seconds that a sample takes")
    parser.add_argument("--workers", type=int, default=1, help="processes that fetch, for each rank")
    parser.add_argument("--directory", help="where the batches lie, in place of shared memory")
    args = parser.parse_args()

    session = instep.init()
    torch.manual_seed(0)
    loader = MmapLoader(
        Waves(320, args.cost), batch_size=16, shuffle=True, drop_last=True, num_workers=args.workers, directory=args.directory
    )
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.protect(model=model, optimizer=optimizer, loader=loader)

    @session.recoverable
    def train() -> None:
        for _ in range(loader.epoch, args.epochs):
            for waves, labels in loader:
                loss = nn.functional.cross_entropy(model(waves), labels)
                loss.backward()
                with session.commit():
                    optimizer.step()
                    optimizer.zero_grad()
                if session.step % 10 == 0 and session.rank == 0:
                    print(f"step {session.step:4d}  loss {loss.item():.4f}", flush=True)

    train()


if __name__ == "__main__":
    main()
