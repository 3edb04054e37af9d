"""A rehearsal of a training step, in a process that waits to replace a rank.

The first step of a forked process takes twice as long as the second: kernels are looked up, and pages that it shares with the fork server
are copied when they are first touched. A spare process has all that behind it before it is needed. Nothing of it can be seen by a script:
generators are seeded anew when the process becomes a rank.
"""

import torch
from torch import nn
from torch.nn import functional as F

_WIDTH = 64


def rehearse() -> None:
    """One step of a small model on the CPU: the layers, losses and optimizers that most scripts use."""
    hidden = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.LayerNorm(_WIDTH), nn.GELU(), nn.ReLU(), nn.Dropout(0.1))
    model = nn.ModuleDict({"words": nn.Embedding(_WIDTH, _WIDTH), "hidden": hidden, "convolution": nn.Conv2d(1, 1, 3)})
    optimizers = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    words = torch.arange(_WIDTH)
    x = model["hidden"](model["words"](words))
    picture = model["convolution"](x[None, None])
    x = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)[0, 0]
    (F.cross_entropy(x, words) + F.mse_loss(picture, picture.detach() + 1.0)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
