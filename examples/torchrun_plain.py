"""A torchrun script that has never heard of instep: plain DDP over gloo that saves checkpoints and resumes from them by itself.

torchrun --nproc-per-node 4 --max-restarts 3 examples/torchrun_plain.py --directory /tmp/plain
instep run --nproc-per-node 4 --max-restarts 3 examples/torchrun_plain.py --directory /tmp/plain
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(network(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args.directory.mkdir(parents=True, exist_ok=True)
    checkpoint = args.directory / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    print(f"rank {rank} pid {os.getpid()} starts at step {start}", flush=True)

    for step in range(start, args.steps):
        random = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(32, 64, generator=random)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {step + 1} at {time.monotonic():.4f} loss {loss.item():.4f}", flush=True)
            if (step + 1) % args.every == 0:
                state = {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, args.directory / "new.pt")
                os.replace(args.directory / "new.pt", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
