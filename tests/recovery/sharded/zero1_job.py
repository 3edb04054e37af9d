"""The job of the tests of ZeRO-1: DistributedDataParallel with a ``ZeroRedundancyOptimizer``, and digests of its end."""

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import instep
from instep.testing.finals import digest, tell

REFUSED = ("overlap", "scaler", "two", "closure", "thaw")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--buckets", action="store_true", help="parameters_as_bucket_view")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--refused", choices=REFUSED)
    return parser.parse_args()


def network(*, frozen: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 19), nn.BatchNorm1d(19), nn.Tanh(), nn.Dropout(0.1), nn.Linear(19, 5), nn.Linear(5, 3))
    if frozen:
        model[0].weight.requires_grad_(False)
        model[4].bias.requires_grad_(False)
    return model


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    session = instep.init()
    torch.manual_seed(7)
    model = DistributedDataParallel(network(frozen=args.frozen))
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    overlap = args.refused == "overlap"
    optimizer = ZeroRedundancyOptimizer(
        list(model.parameters()) if overlap else groups,
        torch.optim.AdamW,
        parameters_as_bucket_view=args.buckets,
        overlap_with_ddp=overlap,
        lr=1e-2,
        foreach=False,
    )
    others: dict[str, Any] = {}
    if args.refused == "scaler":
        others["scaler"] = torch.amp.GradScaler("cpu")
    if args.refused == "two":
        others["second"] = ZeroRedundancyOptimizer(vectors, torch.optim.SGD, lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if not overlap else {"none": 0}
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, **others)
    torch.manual_seed(100 + session.rank)

    @session.recoverable
    def train() -> None:
        while session.step < args.steps:
            generator = torch.Generator().manual_seed(session.step * 100 + session.rank)
            loss = model(torch.randn(6, 12, generator=generator)).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            if args.refused == "thaw" and session.step == 2:
                model.module[0].weight.requires_grad_(False)
            with session.commit():
                optimizer.step(*([lambda: 0.0] if args.refused == "closure" else []))
                scheduler.step()
                optimizer.zero_grad()

    train()
    moments = [v for p in optimizer.optim.state for v in optimizer.optim.state[p].values()]
    rates = [[g["lr"] for g in each.param_groups] for each in (optimizer, optimizer.optim)]
    final = {
        "steps": session.step,
        "model": digest(list(model.state_dict().values())),
        "moments": digest(moments),
        "rates": rates,
        "torch": digest([torch.get_rng_state()]),
        "schedule": scheduler.last_epoch,
    }
    tell(final)


if __name__ == "__main__":
    main()
