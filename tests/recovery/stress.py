"""Random faults for as long as asked: `python -m tests.recovery.stress --minutes 10`; `--seed N --jobs 1` repeats a job by its seed."""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from instep.agent.agent import Launch, serving
from tests.recovery.harness import BEFORE_BARRIER, BEHIND_BARRIER, IN_RECOVERY, JOB, KINDS, Fault, Jobs, Shape

POINTS = (*BEFORE_BARRIER, *BEHIND_BARRIER)


def faults(draw: random.Random, ranks: int, steps: int) -> list[Fault]:
    """Two to ten faults: in any step, sometimes two at once, sometimes another in the recovery.

    Of all ranks one stays whole in every step and the next: when all lose their state before a recovery ends, nobody can help.
    """
    wanted: list[Fault] = []
    for step in sorted(draw.sample(range(steps), draw.randint(2, 6))):
        victim = draw.randrange(ranks)
        wanted.append(Fault(draw.choices(KINDS, (5, 4, 1))[0], victim, draw.choice(POINTS), step))
        other = draw.choice([r for r in range(ranks) if r != victim])
        match draw.random():
            case luck if luck < 0.2:
                wanted.append(Fault(draw.choice(KINDS[:2]), other, draw.choice(POINTS), step))
            case luck if luck < 0.4:
                wanted.append(Fault(draw.choices(KINDS, (5, 4, 1))[0], draw.randrange(ranks), draw.choice(IN_RECOVERY), step))
    out: list[Fault] = []
    for fault in wanted:
        near = {f.rank for f in out if f.step is not None and fault.step is not None and fault.step - f.step <= 1}
        if len(near | {fault.rank}) < ranks:
            out.append(fault)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="seed of the first job (default: from the clock); the next ones count up")
    parser.add_argument("--jobs", type=int, default=None, help="stop after this many jobs")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    end = time.monotonic() + 60 * args.minutes
    total = incidents = done = 0
    failed: list[int] = []
    launch = Launch(script=str(JOB), nproc=4)
    with tempfile.TemporaryDirectory(prefix="instep-stress-") as directory, serving(launch) as server:
        jobs = Jobs(Path(directory), server)
        while time.monotonic() < end and (args.jobs is None or done < args.jobs):
            draw = random.Random(seed)
            shape = Shape(ranks=draw.choice((3, 4)), steps=12, workers=draw.choice((0, 0, 0, 2)), extra=("--validate", "1"))
            placed = faults(draw, shape.ranks, shape.steps)
            begin = time.monotonic()
            try:
                run = jobs.check(shape, placed, fired=False)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}: FAILED {error}", flush=True)
            else:
                total += len(run.outcome.fired)
                incidents += len(run.incidents)
                print(
                    f"seed {seed}: {len(run.outcome.fired)} faults, {len(run.incidents)} incidents, {time.monotonic() - begin:.1f} s",
                    flush=True,
                )
            seed, done = seed + 1, done + 1
    print(f"{done} jobs, {total} faults in {incidents} incidents; failed seeds: {failed or 'none'}")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
