"""The baseline of `recovery_time.py`: the same GPT under torchrun, with a checkpoint every so many steps and kills of its own.

Every step and kill is a line of `events.jsonl` in the directory, with the monotonic time at which it happened.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, SIZES, StandardLibrary, groups


def event(directory: Path, **fields: object) -> None:
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--params", choices=SIZES, default="1M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="steps at which a rank kills itself, once each")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world, start, data = dist.get_rank(), dist.get_world_size(), 0, StandardLibrary(64)
    torch.manual_seed(0)
    model = DDP(GPT(*SIZES[args.params], 64))
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    checkpoint = args.directory / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data), drop_last=True)
    pending = args.kill[int(os.environ["TORCHELASTIC_RESTART_COUNT"]) :]
    for step, (x, y) in enumerate(loader, start=start):
        if step == args.steps:
            break
        if pending and step == pending[0] and rank == len(pending) % world:
            event(args.directory, event="kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            event(args.directory, event="step", step=step + 1)
            if (step + 1) % args.every == 0:
                torch.save(
                    {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.directory / "new.pt"
                )
                os.replace(args.directory / "new.pt", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
