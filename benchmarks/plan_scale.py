"""What a recovery costs the control plane as the world grows.

First ``plan`` alone, in a process without torch, on votes of thousands of ranks: seconds and memory, beside the target of 1 s and 200 MB
at 10,000 votes. Then whole recoveries of simulated ranks: messages, bytes, and seconds of deciding in the agent.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from random import Random

from instep.model import Address, Group, Plan, Status, Vote
from instep.plan import plan

SECONDS, MEGABYTES = 1.0, 200.0
COPIES = 100


def votes(world: int, *, replicas: int, lost: int, seed: int = 0) -> Sequence[Vote]:
    """Votes of ``world`` ranks of which ``lost`` are fresh, in a random order.

    All are members of one world group; with ``replicas`` each piece of state has so many copies, else the world holds one piece. Equal
    tuples of ranks are one object, as in an agent that keeps each group once.
    """
    everyone = tuple(range(world))
    copies = replicas or world
    shards = world // copies
    pieces = [tuple(range(piece, world, shards)) for piece in range(shards)]
    chance = Random(seed)
    fresh = set(chance.sample(everyone, lost))
    made = []
    for rank in everyone:
        piece = pieces[rank % shards]
        group = Group.model_construct(name="world", ranks=everyone, backend="gloo")
        inner = Group.model_construct(name=f"replica{rank % shards}", ranks=piece, backend="gloo")
        made.append(
            Vote.model_construct(
                rank=rank,
                birth=int(rank in fresh),
                incarnation=1,
                block=0,
                step=0 if rank in fresh else 100,
                status=Status.FRESH if rank in fresh else Status.CLEAN,
                groups=(group, inner) if replicas else (group,),
                address=Address(rank=rank, birth=int(rank in fresh), host="10.0.0.1", ports={"gloo": 1000, "peer": 1001}),
                shards={f"piece{rank % shards}": piece},
                notes={"init_gloo": {"host": "10.0.0.1", "pairs": {"world": 0}}},
            )
        )
    chance.shuffle(made)
    return made


def alone(world: int, *, replicas: int, lost: int) -> dict[str, float]:
    """Seconds of ``plan``, the memory that it took beside its votes, and the most that the whole process ever took."""
    cast = votes(world, replicas=replicas, lost=lost)
    seconds = min(_timed(cast) for _ in range(3))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tracemalloc.start()
    made = plan(cast)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if not isinstance(made, Plan) or made.step != 100:
        raise SystemExit(f"no plan: {made}")
    return {"seconds": seconds, "plan_mb": peak / 2**20, "process_mb": most}


def _timed(cast: Sequence[Vote]) -> float:
    began = time.perf_counter()
    plan(cast)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--votes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--alone", type=int, nargs=3, metavar=("WORLD", "REPLICAS", "LOST"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        world, replicas, lost = asked.alone
        print(json.dumps(alone(world, replicas=replicas, lost=lost)))
        return 0
    print("plan alone (state: one piece on all ranks, or pieces with 100 copies each)")
    print(f"{'votes':>7} {'copies':>7} {'lost':>6} {'ms':>8} {'plan MB':>8} {'process MB':>11}")
    worst = {"seconds": 0.0, "process_mb": 0.0}
    for world in asked.votes:
        for replicas, lost in ((0, 1), (COPIES, 1), (COPIES, world // 10), (0, world // 2)):
            arguments = [str(n) for n in (world, replicas, lost)]
            out = subprocess.run([sys.executable, __file__, "--alone", *arguments], check=True, capture_output=True, text=True).stdout
            row = json.loads(out)
            worst = {key: max(value, row[key]) for key, value in worst.items()}
            copies = replicas or world
            print(f"{world:7} {copies:7} {lost:6} {1e3 * row['seconds']:8.1f} {row['plan_mb']:8.1f} {row['process_mb']:11.1f}")
    print()
    sys.stdout.flush()
    simulated = subprocess.run([sys.executable, "-m", "instep.testing.simulator", "--ranks", *map(str, asked.ranks)], check=False)
    within = worst["seconds"] < SECONDS and worst["process_mb"] < MEGABYTES
    print(f"\nworst plan {worst['seconds']:.3f} s (target {SECONDS} s), {worst['process_mb']:.0f} MB (target {MEGABYTES:.0f} MB)")
    return 0 if within and simulated.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
