"""Everything a real loop has: epochs, validation with collectives, early stopping, accumulation, a gradient scaler, an average of weights.

instep run --nproc-per-node 4 examples/train_epochs.py --epochs 8 --workers 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep

Data = DataLoader[tuple[Tensor, ...]]


class EarlyStopping:
    """Stops after `patience` validations in a row without a better loss. Shared state: it changes inside a commit only."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    @property
    def stop(self) -> bool:
        return self.waited >= self.patience

    def update(self, loss: float) -> None:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(loss, self.best)

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.waited = state["best"], int(state["waited"])


def datasets(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Points on a noisy curve that a small network learns in some epochs: for training and for validation."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count + count // 4, 16, generator=random)
    noise = torch.randn(len(x), 1, generator=random)
    y = torch.sin(x[:, :4].sum(dim=1, keepdim=True)) + 0.3 * x[:, 4:5] * x[:, 5:6] + 0.1 * noise
    return TensorDataset(x[:count], y[:count]), TensorDataset(x[count:], y[count:])


def network() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(16, 64), *hidden, nn.Linear(64, 1))


@torch.no_grad()
def evaluate(model: nn.Module, loader: Data) -> float:
    """The mean loss over all ranks' validation data."""
    model.eval()
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum").item(), len(y)])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def groups(parameters: nn.ParameterList) -> list[dict[str, object]]:
    """Matrices decay, everything else does not."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, on each rank")
    return parser.parse_args()


args = arguments()
session = instep.init()
torch.manual_seed(0)
training, validation = datasets(4096)
loader = DataLoader(training, batch_size=32, sampler=DistributedSampler(training), num_workers=args.workers)
held_out = DataLoader(validation, batch_size=64, sampler=DistributedSampler(validation, shuffle=False))
model = DDP(network())
parameters = nn.ParameterList(model.parameters())
average = AveragedModel(parameters, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(groups(parameters), lr=2e-3)
steps_an_epoch = len(loader) // 2
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_an_epoch)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=25)
stopping = EarlyStopping(patience=3)
session.protect(model=model, average=average, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
session.protect(stopping=stopping, loader=loader)


def backward(x: Tensor, y: Tensor) -> None:
    scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()


@session.recoverable
def train() -> str:
    for epoch in range(loader.epoch, args.epochs):
        batches = iter(loader)
        for first, second in zip(batches, batches, strict=False):  # two batches a step
            if stopping.stop:
                return f"stopped early, best loss {stopping.best:.4f}"
            measured = evaluate(model, held_out) if session.step % steps_an_epoch == 0 else None
            with model.no_sync():
                backward(*first)
            backward(*second)
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, 1.0)
            with session.commit():
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                average.update_parameters(parameters)
                optimizer.zero_grad()
                if measured is not None:
                    stopping.update(measured)
            if measured is not None and session.rank == 0:
                print(f"epoch {epoch}  step {session.step:4d}  validation loss {measured:.4f}  best {stopping.best:.4f}", flush=True)
    return f"all epochs done, best loss {stopping.best:.4f}"


outcome = train()
if session.rank == 0 and outcome:  # a drill ends the block early
    print(outcome)
