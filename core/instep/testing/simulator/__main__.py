"""The simulator's command line: ``--seeds N`` runs many, ``--seed N --trace`` shows one, ``--ranks N`` tells what a large world costs."""

import argparse
import sys
import time
from collections.abc import Sequence

from instep.testing.simulator.campaign import Tally, campaign
from instep.testing.simulator.checks import Violation
from instep.testing.simulator.scale import costs
from instep.testing.simulator.schedule import drawn
from instep.testing.simulator.world import World, quiet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m instep.testing.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, help="processes; one for each core by default")
    parser.add_argument("--ranks", type=int, nargs="+", help="what one recovery costs in worlds of so many ranks")
    asked = parser.parse_args(arguments)
    if asked.ranks:
        return _scale(asked.ranks)
    if asked.seed is not None:
        return _one(asked.seed, trace=asked.trace)
    return _many(asked.first, asked.seeds, asked.jobs)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _one(seed: int, *, trace: bool) -> int:
    schedule = drawn(seed)
    _say(f"{schedule}")
    try:
        with quiet():
            outcome = World(schedule, trace=_say if trace else None).run()
    except Violation as error:
        _say(f"FAILED {error}")
        return 1
    _say(f"code {outcome.end.code} after {outcome.seconds:.3f} s of virtual time, {outcome.incidents} incidents {outcome.end.message}")
    return 0


def _many(first: int, seeds: int, jobs: int | None) -> int:
    began = time.monotonic()
    told = 0

    def progress(tally: Tally) -> None:
        nonlocal told
        for seed, message in tally.failures[told:]:
            _say(f"FAILED seed {seed}: {message}")
        told = len(tally.failures)

    total = campaign(first, seeds, jobs=jobs, progress=progress)
    seconds = time.monotonic() - began
    _say(
        f"{total.seeds} seeds in {seconds:.1f} s: {total.whole} whole, {total.given_up} given up by name, {len(total.failures)} failed; "
        f"{total.incidents} incidents, {total.incarnations} incarnations, {total.events} events"
    )
    _say("troubles: " + ", ".join(f"{kind} {count}" for kind, count in sorted(total.kinds.items())))
    return int(bool(total.failures))


def _scale(ranks: Sequence[int]) -> int:
    _say(f"{'ranks':>6} {'messages':>9} {'kB':>9} {'deciding ms':>12} {'of it plan ms':>14} {'in step, virtual ms':>20}")
    for world in ranks:
        c = costs(world)
        _say(f"{c.world:6} {c.messages:9} {c.bytes / 1e3:9.0f} {1e3 * c.deciding:12.1f} {1e3 * c.planning:14.1f} {1e3 * c.recovered:20.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
