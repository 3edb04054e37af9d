"""What `recovery_time.py` trains: Linear, BatchNorm, ReLU and Dropout under DDP and AdamW, by instep or, as the baseline, by torchrun.

The baseline writes a checkpoint every so many steps and kills its own ranks. Every step and kill of it is a line of `events.jsonl` in the
directory, with the monotonic time at which it happened.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SIZES = {"1M": (400, 6), "25M": (2000, 6)}
"""Width and layers: 1.0 and 24.2 million parameters."""
_BATCH, _IN, _OUT = 16, 32, 8


def model(params: str) -> nn.Module:
    width, layers = SIZES[params]
    hidden = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)) for _ in range(layers)]
    return nn.Sequential(nn.Linear(_IN, width), *hidden, nn.Linear(width, _OUT))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(_BATCH, _IN), torch.randn(_BATCH, _OUT)


def by_instep(args: argparse.Namespace) -> None:
    import instep

    session = instep.init()
    torch.manual_seed(session.rank)
    net = DDP(model(args.params))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    session.protect(model=net, optimizer=optimizer)

    @session.recoverable
    def train() -> None:
        while session.step < args.steps:
            x, y = batch()
            F.mse_loss(net(x), y).backward()
            with session.commit():
                optimizer.step()
                optimizer.zero_grad()

    train()


def by_torchrun(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, world, start = dist.get_rank(), dist.get_world_size(), 0
    torch.manual_seed(rank)
    net = DDP(model(args.params))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoint = args.directory / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    pending = args.kill[int(os.environ["TORCHELASTIC_RESTART_COUNT"]) :]
    for step in range(start, args.steps):
        if pending and step == pending[0] and rank == len(pending) % world:
            event(args.directory, event="kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            event(args.directory, event="step", step=step + 1)
            if (step + 1) % args.every == 0:
                state = {"step": step + 1, "model": net.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, args.directory / "new.pt")
                os.replace(args.directory / "new.pt", checkpoint)
    dist.destroy_process_group()


def event(directory: Path, **fields: object) -> None:
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=SIZES, default="1M")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", type=Path, help="train by torchrun, with checkpoints here")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="steps at which a rank kills itself, once each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.directory is None:
        by_instep(args)
    else:
        by_torchrun(args)


if __name__ == "__main__":
    main()
