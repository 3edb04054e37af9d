"""What instep costs a training without faults: alternating blocks of steps in one job, so that the machine's noise hits all alike.

    python benchmarks/healthy_overhead.py --ranks 4 --json

Three ways to train the same model: through instep with commits, plain DDP with one bare 4-byte all-reduce a step, and plain DDP alone. The
target is the difference of the first two, at most 0.5 ms a step at 4 ranks. The difference of the last two is what the commit barrier costs
by itself, hence what could be saved if it rode on the last gradient bucket.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

WAYS = ("instep", "bare", "plain")


def worker(args: argparse.Namespace) -> None:
    """One rank: all three ways in turn, `args.rounds` times."""
    import sys

    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    import instep

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from train_gpt import GPT, SIZES, groups

    session = instep.init()
    stock = _stock_group(args.directory / "store", session.rank, session.world_size)
    torch.manual_seed(session.rank)
    batch = torch.randint(0, 256, (4, 33))

    def build(group: dist.ProcessGroup | None) -> tuple[DDP, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = DDP(GPT(*SIZES[args.params], 64, dropout=0.0), process_group=group)
        return model, torch.optim.AdamW(groups(model))

    model, optimizer = build(None)
    plain_model, plain_optimizer = build(stock)
    session.protect(model=model, optimizer=optimizer, plain_model=plain_model, plain_optimizer=plain_optimizer)
    flag = torch.zeros(1)

    def forward_backward(network: DDP) -> None:
        F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()

    def with_instep() -> None:
        forward_backward(model)
        with session.commit():
            optimizer.step()
            optimizer.zero_grad()

    def plain(*, bare: bool) -> None:
        forward_backward(plain_model)
        if bare:
            stock.allreduce([flag]).wait()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    @session.recoverable
    def protected(steps: int) -> None:
        target = session.step + steps - session.step % steps
        while session.step < target:
            with_instep()

    def timed(run: Callable[[], object]) -> float:
        stock.barrier().wait()
        begin = time.perf_counter()
        run()
        seconds = torch.tensor([(time.perf_counter() - begin) / args.steps], dtype=torch.float64)
        stock.allreduce([seconds], dist.ReduceOp.MAX).wait()
        return seconds.item()

    ways: dict[str, Callable[[], object]] = {
        "instep": lambda: protected(args.steps),
        "bare": lambda: [plain(bare=True) for _ in range(args.steps)],
        "plain": lambda: [plain(bare=False) for _ in range(args.steps)],
    }
    rounds = [{way: timed(ways[way]) for way in WAYS} for _ in range(args.rounds + 1)][1:]
    if session.rank == 0:
        (args.directory / "rounds.json").write_text(json.dumps(rounds))


def _stock_group(path: Path, rank: int, size: int) -> "dist.ProcessGroup":  # type: ignore[name-defined]  # noqa: F821
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

    def difference(one: str, other: str) -> float:
        return 1e3 * statistics.median(r[one] - r[other] for r in rounds)

    medians = {way: 1e3 * statistics.median(r[way] for r in rounds) for way in WAYS}
    return {
        "ranks": args.ranks,
        "params": args.params,
        "step_ms": medians,
        "overhead_ms": difference("instep", "bare"),
        "bare_all_reduce_ms": difference("bare", "plain"),
        "overhead_ratio": medians["instep"] / medians["bare"],
        "target_ms": 0.5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--params", default="small")
    parser.add_argument("--steps", type=int, default=50, help="steps in a block")
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
