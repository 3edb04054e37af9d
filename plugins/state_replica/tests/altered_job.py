"""A job in which one value changes in the memory of one rank, ``sys.argv[1]``, before step 3: nothing that a training notices by itself."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep


def main() -> None:
    """Train until the test ends the block."""
    session = instep.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.protect(model=model, optimizer=optimizer)

    @session.recoverable
    def train() -> None:
        while True:
            if session.step == 3 and session.rank == int(sys.argv[1]):
                model.module.weight.detach().numpy()[0, 0] += 1
            model(torch.randn(8, 16)).square().mean().backward()
            with session.commit():
                optimizer.step()
                optimizer.zero_grad()

    train()


if __name__ == "__main__":
    main()
