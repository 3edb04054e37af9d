"""A small GPT learns to write Python from the source files of the standard library, on as many ranks as it is given.

instep run --nproc-per-node 4 examples/train_gpt.py --steps 200
instep drill --ranks 4 --steps 60 --kill 0@20 --raise 1@30 examples/train_gpt.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import instep

SIZES = {"small": (2, 2, 64), "1M": (3, 4, 160), "25M": (8, 8, 512)}
"""Layers, heads and width: about 0.1, 1 and 25 million parameters."""


class StandardLibrary(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of `length` bytes of Python's own source files, each with its next byte at every position."""

    def __init__(self, length: int, limit: int = 2_000_000) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) > limit:
                break
        self.text = torch.frombuffer(text[:limit], dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class Layer(nn.Module):
    """One transformer layer: attention to the past, then a small network, each added to its input."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.before_network(x))


class GPT(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, layers: int, heads: int, width: int, length: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(nn.Dropout(dropout), *(Layer(heads, width, dropout) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.bytes(x) + self.places.weight[: x.shape[1]]))


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, everything else does not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--params", choices=SIZES, default="small")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="print the loss every so many steps")
    args = parser.parse_args()

    session = instep.init()
    torch.manual_seed(args.seed)
    data = StandardLibrary(args.length)
    loader = DataLoader(data, batch_size=args.batch, sampler=DistributedSampler(data, seed=args.seed), drop_last=True)
    model = DDP(GPT(*SIZES[args.params], args.length))
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps + 1)
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    @session.recoverable
    def train() -> None:
        while session.step < args.steps:
            for x, y in loader:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                with session.commit():
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if session.rank == 0 and session.step % args.every == 0:
                    print(f"step {session.step:4d}  loss {loss.item():.4f}", flush=True)
                if session.step == args.steps:
                    return

    train()


if __name__ == "__main__":
    main()
