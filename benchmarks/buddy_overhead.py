"""What buddy copies cost a training without faults: blocks of steps with and without them alternate in each of some jobs.

    python benchmarks/buddy_overhead.py --json

FSDP2 over one mesh dimension, so that all parameters and moments of a rank are unique to it and go to its buddy after each commit. A step
waits, as a processor waits for the accelerator that computes and communicates, then updates and commits; the wait has a fixed length, which
makes a step of 50 ms without copies, so that whatever copies add to it shows. ``--busy`` computes and communicates on the processor all the
time instead: then copies compete with the step for it. They take ``copy_cpu_ms`` of it a step, ``main_cpu_ms`` (``main_share`` of 50 ms) in
the thread that trains. ``behind_ms`` is how long a step's copies are on their way behind the training; once that reaches the length of a
step, the next barrier waits for them.

Several jobs, since one job's memory lies by chance where it is faster or slower in one of the ways.

Exit code 0 only if the median overhead is at most 3 % of a step, on a machine that is quiet enough to tell.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from instep import Session

STEP = 0.05
WIDTH = 256
BUSY = 0.06
"""A step without copies that takes longer shows that others use the machine: nothing can be told from the ratio then."""
BAR = 0.03
PATIENCE = 30.0
WAYS = ("plain", "copies")


def worker(args: argparse.Namespace) -> None:
    """One rank: both ways in turn, ``args.rounds`` times."""
    import torch
    import torch.distributed as dist

    import instep

    torch.set_num_threads(1)
    session = instep.init()
    model, optimizer = _sharded(args.mib, session.world_size)
    session.protect(model=model, optimizer=optimizer)
    wait = [0.0]
    followers = session._engine.local.followers
    keeping = followers._keeping
    buddy = session.plugin("state_replica")._buddies._buddy
    step = _step(session, model, optimizer, busy=args.busy)

    def timed(way: str) -> dict[str, float]:
        followers._copying = keeping if way == "copies" else []
        followers.settled(PATIENCE)
        if way == "plain":
            followers._kept.clear()
        dist.barrier()
        sent = buddy.sent
        begin, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(args.steps):
            step(wait[0])
        own, cpu, seconds = time.thread_time() - own, time.process_time() - cpu, time.perf_counter() - begin
        if (buddy.sent > sent) is not (way == "copies"):
            raise SystemExit(f"{way}: {buddy.sent - sent} bytes were sent to the buddy")
        spent = torch.tensor([seconds / args.steps, cpu / args.steps, own / args.steps, buddy.seconds], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return dict(zip(("step", "cpu", "main", "behind"), spent.tolist(), strict=True))

    @session.recoverable
    def alternate() -> list[dict[str, dict[str, float]]]:
        for _ in range(4):  # the first steps are slower than any later one
            wait[0] = max(0.0, wait[0] + STEP - timed("plain")["step"])
        timed("copies")
        return [{way: timed(way) for way in WAYS[:: 1 if number % 2 else -1]} for number in range(args.rounds)]

    rounds = alternate()
    if session.rank == 0:
        unique = sum(12 * p.to_local().numel() for p in model.parameters())
        told = {"rounds": rounds, "unique_mib": unique / 2**20, "memory_mib": buddy.memory / 2**20, "wait_ms": 1e3 * wait[0]}
        (args.directory / "told.json").write_text(json.dumps(told))


def _sharded(mib: float, size: int) -> "tuple[nn.Module, torch.optim.Optimizer]":
    """A model of which, with its moments, each of ``size`` ranks holds about ``mib``."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(mib * 2**20 * size / 12 / WIDTH**2)))])
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def _step(session: "Session", model: "nn.Module", optimizer: "torch.optim.Optimizer", *, busy: bool) -> Callable[[float], None]:
    """One step, given the seconds that it waits or computes on top. Gradients of the first one stand for all, unless it is ``busy``."""
    import torch

    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(session.rank))
    gradients = [False]

    def step(seconds: float) -> None:
        if busy or not gradients[0]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            gradients[0] = True
        end = time.thread_time() + seconds
        while busy and time.thread_time() < end:
            sum(range(1000))
        time.sleep(0 if busy else seconds)
        with session.commit():
            optimizer.step()

    return step


def job(args: argparse.Namespace) -> dict[str, Any]:
    """One job: what its first rank told."""
    from instep import config
    from instep.agent.agent import Launch, run

    settings = {"plugins.state_replica": {"buddies": True}}
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        own = ["--worker", directory, "--mib", str(args.mib), "--steps", str(args.steps), "--rounds", str(args.rounds)]
        own += ["--busy"] if args.busy else []
        outcome = run(Launch(script=__file__, args=tuple(own), nproc=args.ranks, config=config.load(overrides=settings).config, quiet=True))
        if outcome.code:
            raise SystemExit(f"the job ended with code {outcome.code}: {outcome.message}")
        told: dict[str, Any] = json.loads((Path(directory) / "told.json").read_text())
    return told


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run the jobs and reduce the rounds of all of them to medians."""
    jobs = [job(args) for _ in range(args.jobs)]
    rounds = [r for told in jobs for r in told.pop("rounds")]

    def median(of: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(of(r) for r in rounds)

    overhead = median(lambda r: r["copies"]["step"] / r["plain"]["step"] - 1)
    plain = 1e3 * median(lambda r: r["plain"]["step"])
    quiet = plain < 1e3 * BUSY
    return {
        "ranks": args.ranks,
        **{key: statistics.median(told[key] for told in jobs) for key in jobs[0]},
        "step_ms": {"plain": plain, "copies": 1e3 * median(lambda r: r["copies"]["step"])},
        "overhead": overhead,
        "main_cpu_ms": 1e3 * median(lambda r: r["copies"]["main"] - r["plain"]["main"]),
        "main_share": median(lambda r: r["copies"]["main"] - r["plain"]["main"]) / STEP,
        "copy_cpu_ms": 1e3 * median(lambda r: r["copies"]["cpu"] - r["plain"]["cpu"]),
        "behind_ms": 1e3 * median(lambda r: r["copies"]["behind"]),
        "bar": BAR,
        "quiet": quiet,
        "ok": quiet and overhead <= BAR,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=8.0, help="unique state of a rank: its shards and their moments")
    parser.add_argument("--steps", type=int, default=20, help="steps of one way before the next has its turn")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a job")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="compute instead of waiting")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, dest="directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        worker(args)
        return 0
    result = measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20s} {value}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
