"""How long a lost rank stops a training with megatron-core: from SIGKILL to the first step that all ranks have committed.

    python benchmarks/recovery_megatron.py --kills 20 --json

One job of the tests' tiny GPT on a CPU, 4 ranks in two instances of the distributed optimizer, each rank killed in turn at places drawn
from a seed. Needs megatron-core (`pip install 'instep-state-replica[megatron]'`). Megatron's own groups, gloo's among them, are counted.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from instep import config, drill
from instep.agent.agent import Launch, run
from instep.messages import Injection
from instep.model import IncidentReport

JOB = Path(__file__).parents[1] / "plugins" / "state_replica" / "tests" / "mcore" / "mcore_job.py"
RANKS = 4
GAP = 30
"""Steps between two kills: a second and more, so that a recovery does not begin while the one before it is being cleaned up."""
LAYOUTS = {
    "dp4-2-instances": ["--instances", "2"],
    "tp2-dp2": ["--tp", "2", "--instances", "2"],
    "pp2-dp2": ["--pp", "2", "--instances", "2"],
}


def row(layout: str, kills: int, logs: Path) -> dict[str, object]:
    """One job: medians of seconds, and of the slowest rank in each phase."""
    draw = random.Random(0)
    placed = [Injection(id=i, rank=i % RANKS, kind="kill", step=(i + 1) * GAP, point=draw.choice(drill.ANYWHERE)) for i in range(kills)]
    outcome = run(
        Launch(
            script=str(JOB),
            args=(*LAYOUTS[layout], "--steps", str((kills + 1) * GAP)),
            nproc=RANKS,
            config=config.load(overrides={"preload": ["mcore_warm"]}).config,
            injections=tuple(placed),
            log_dir=str(logs),
            quiet=True,
        )
    )
    if outcome.code or len(outcome.incidents) != kills:
        raise SystemExit(f"{layout}: code {outcome.code}, {len(outcome.incidents)} of {kills} incidents: {outcome.message}")
    return {
        "layout": layout,
        "groups": _groups(logs),
        "kills": kills,
        "to_resume": _spread([i.seconds_to_resume for i in outcome.incidents]),
        "to_step": _spread([i.seconds_to_step for i in outcome.incidents]),
        "phases": _phases(outcome.incidents),
    }


def _groups(logs: Path) -> int:
    lines = [line for line in (logs / "rank-0.log").read_text().splitlines() if line.startswith("FINAL ")]
    return int(json.loads(lines[-1].removeprefix("FINAL "))["process groups"])


def _spread(values: Sequence[float | None]) -> dict[str, float]:
    known = sorted(v for v in values if v is not None)
    return {"median": statistics.median(known), "min": known[0], "max": known[-1]}


def _phases(incidents: Sequence[IncidentReport]) -> dict[str, float]:
    slowest: dict[str, list[float]] = defaultdict(list)
    for incident in incidents:
        for name in {r.phase for r in incident.phases}:
            slowest[name].append(max(r.seconds for r in incident.phases if r.phase == name))
    return {name: statistics.median(values) for name, values in slowest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["dp4-2-instances"], choices=LAYOUTS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        rows = [row(layout, args.kills, Path(directory) / layout) for layout in args.layouts]
    if args.json:
        print(json.dumps(rows))
        return
    print("layout             groups kills  resume s  step s (min-max)       phases (slowest rank, ms)")
    for r in rows:
        step, phases = r["to_step"], r["phases"]
        print(
            f"{r['layout']:<18s} {r['groups']:>6d} {r['kills']:>5d} {r['to_resume']['median']:>9.3f} {step['median']:>7.3f}"
            f" ({step['min']:.3f}-{step['max']:.3f})   " + " ".join(f"{name} {1e3 * s:.0f}" for name, s in phases.items())
        )


if __name__ == "__main__":
    main()
