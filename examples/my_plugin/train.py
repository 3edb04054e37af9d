"""DDP training on a rank whose arithmetic goes wrong: `--bad 1@5 --times 2` makes the loss of rank 1 NaN in step 5, two times in a row.

    INSTEP_PLUGINS__MY_PLUGIN=true instep run --nproc-per-node 3 examples/my_plugin/train.py --bad 1@5 --times 2

The fault is in the process that the job began with: what replaces it is sound.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import instep

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bad", default="", metavar="R@S", help="rank and step of the bad loss")
parser.add_argument("--times", type=int, default=1, help="how often it is bad before it is good again")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

session = instep.init()
sound = session.once(os.getpid) != os.getpid()  # a replacement is told what its predecessor's call returned
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
guard = session.plugin("my_plugin")
left = args.times


@session.recoverable
def train() -> None:
    global left
    while session.step < args.steps:
        inputs = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        if left and not sound and args.bad == f"{session.rank}@{session.step}":
            left -= 1
            loss = loss * float("nan")
        loss.backward()
        if guard is not None:
            guard.watch(loss.detach())
        with session.commit():
            optimizer.step()
            optimizer.zero_grad()


train()
