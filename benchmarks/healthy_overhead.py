"""What instep costs a training without faults: alternating blocks of steps in one job, so that the machine's noise hits all alike.

    python benchmarks/healthy_overhead.py --ranks 4 --json

Four ways to train the same model: through instep with commits, plain DDP with one bare 4-byte all-reduce a step, plain DDP with instep's
barrier a step and nothing else of it, and plain DDP alone. The target is the difference of the first two, at most 0.5 ms a step at 4 ranks.
The others show what the bare all-reduce and the barrier cost by themselves; the latter is what could be saved if the barrier rode on the
last gradient bucket. Beside seconds on the clock it tells processor time, of all threads of a rank, which depends less on what else the
machine does. With more ranks than cores, processor time of one rank keeps others waiting.

The plain side is built before instep is there: its model is not protected, and its group, hooks and state are torch's own.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

WAYS = ("instep", "bare", "barrier", "plain")
_CLOCK, _BUSY = 0, 1


def worker(args: argparse.Namespace) -> None:
    """One rank: all ways in turn, `args.rounds` times."""
    import torch

    import instep
    from instep.commit import barrier

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stock = _stock_group(args.directory / "store", rank, size)
    plain_step, plain_optimizer = _trainer(args.params, stock, rank)
    session = instep.init()
    step, optimizer = _trainer(args.params, None, rank)
    session.protect(**step.protected)
    flag = torch.zeros(1)

    def protected() -> None:
        for _ in range(args.steps):
            step()
            with session.commit():
                optimizer.step()
                optimizer.zero_grad()

    def plain(before_update: Callable[[], object]) -> None:
        for _ in range(args.steps):
            plain_step()
            before_update()
            plain_optimizer.step()
            plain_optimizer.zero_grad()

    ways: dict[str, Callable[[], object]] = {
        "instep": protected,
        "bare": lambda: plain(lambda: stock.allreduce([flag]).wait()),
        "barrier": lambda: plain(lambda: barrier(session._engine, done=False)),
        "plain": lambda: plain(bool),
    }

    @session.recoverable
    def alternate() -> list[dict[str, tuple[float, float]]]:
        # Each round begins with another way: none always follows the same one, whose data fill the caches.
        orders = [WAYS[i % len(WAYS) :] + WAYS[: i % len(WAYS)] for i in range(args.rounds + 1)]
        return [{way: _timed(ways[way], args.steps, stock) for way in order} for order in orders][1:]

    rounds = alternate()
    if session.rank == 0:
        (args.directory / "rounds.json").write_text(json.dumps(rounds))


def _timed(run: Callable[[], object], steps: int, group: "dist.ProcessGroup") -> tuple[float, float]:
    """Seconds a step of the slowest rank, and seconds of processor time a step and rank."""
    import torch
    import torch.distributed as dist

    group.barrier().wait()
    begin, busy = time.perf_counter(), time.process_time()
    run()
    busy = time.process_time() - busy
    slowest = torch.tensor([(time.perf_counter() - begin) / steps], dtype=torch.float64)
    total = torch.tensor([busy / steps / group.size()], dtype=torch.float64)
    group.allreduce([slowest], dist.ReduceOp.MAX).wait()
    group.allreduce([total]).wait()
    return slowest.item(), total.item()


def _trainer(params: str, group: "dist.ProcessGroup | None", rank: int) -> "tuple[Step, torch.optim.Optimizer]":
    """Forward and backward of one model over a process group, and its optimizer."""
    import sys

    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from train_gpt import GPT, SIZES, groups

    torch.manual_seed(0)
    model = DDP(GPT(*SIZES[params], 64, dropout=0.0), process_group=group)
    optimizer = torch.optim.AdamW(groups(model))
    batch = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(rank))
    return Step(model, batch, {"model": model, "optimizer": optimizer}), optimizer


@dataclass(frozen=True)
class Step:
    """Forward and backward on always the same batch."""

    model: "torch.nn.Module"
    batch: "torch.Tensor"
    protected: "dict[str, object]"

    def __call__(self) -> None:
        from torch.nn import functional as F

        scores = self.model(self.batch[:, :-1])
        F.cross_entropy(scores.flatten(0, 1), self.batch[:, 1:].flatten()).backward()


def _stock_group(path: Path, rank: int, size: int) -> "dist.ProcessGroup":
    """A gloo group that instep knows nothing of."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(path), size)
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run the job and reduce its rounds to medians and differences, in milliseconds a step."""
    from instep import config
    from instep.agent.agent import Launch, run

    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        own = ("--worker", directory, "--params", args.params, "--steps", str(args.steps), "--rounds", str(args.rounds))
        outcome = run(Launch(script=__file__, args=own, nproc=args.ranks, config=config.load().config, quiet=True))
        if outcome.code:
            raise SystemExit(f"the job ended with code {outcome.code}: {outcome.message}")
        rounds = json.loads((Path(directory) / "rounds.json").read_text())

    def difference(one: str, other: str, which: int = _CLOCK) -> float:
        return 1e3 * statistics.median(r[one][which] - r[other][which] for r in rounds)

    def medians(which: int) -> dict[str, float]:
        return {way: 1e3 * statistics.median(r[way][which] for r in rounds) for way in WAYS}

    steps = medians(_CLOCK)
    return {
        "ranks": args.ranks,
        "params": args.params,
        "step_ms": steps,
        "overhead_ms": difference("instep", "bare"),
        "bare_all_reduce_ms": difference("bare", "plain"),
        "barrier_ms": difference("barrier", "plain"),
        "overhead_ratio": steps["instep"] / steps["bare"],
        "processor_ms": medians(_BUSY),
        "overhead_processor_ms": difference("instep", "bare", _BUSY),
        "target_ms": 0.5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--params", default="small")
    parser.add_argument("--steps", type=int, default=50, help="steps of one way before the next has its turn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, dest="directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        worker(args)
        return
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:20s} {value}")


if __name__ == "__main__":
    main()
