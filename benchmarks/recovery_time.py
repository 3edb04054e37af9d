"""How long a lost rank stops a training: from SIGKILL to the first step that all ranks have committed, beside torchrun's restart.

    python benchmarks/recovery_time.py --params 1M 25M --ranks 2 3 4 --kills 10 --json

Each row is one job of `recovery_job.py` with its ranks killed in turn, at places drawn from a seed. The baseline trains the same
model under torchrun with a checkpoint every 50 steps; its time runs from SIGKILL to the end of the first step after the restart, and to
the step at which the lost steps are made up for.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from instep import config, drill
from instep.agent.agent import Launch, run
from instep.messages import Injection
from instep.model import IncidentReport

JOB = str(Path(__file__).with_name("recovery_job.py"))
GAP = {"1M": 80, "25M": 12}
"""Steps between two kills: a few seconds, so that a recovery does not begin while the one before it is being cleaned up."""


def instep_row(params: str, ranks: int, kills: int) -> dict[str, object]:
    """One job with `kills` kills: medians of seconds, and of the slowest rank in each phase."""
    draw = random.Random(0)
    placed = [
        Injection(id=i, rank=i % ranks, kind="kill", step=(i + 1) * GAP[params], point=draw.choice(drill.ANYWHERE)) for i in range(kills)
    ]
    args = ("--params", params, "--steps", str((kills + 1) * GAP[params]))
    outcome = run(Launch(script=JOB, args=args, nproc=ranks, config=config.load().config, injections=tuple(placed), quiet=True))
    if outcome.code or len(outcome.incidents) != kills:
        raise SystemExit(
            f"{params} on {ranks} ranks: code {outcome.code}, {len(outcome.incidents)} of {kills} incidents: {outcome.message}"
        )
    return {
        "params": params,
        "ranks": ranks,
        "kills": kills,
        "to_resume": _spread([i.seconds_to_resume for i in outcome.incidents]),
        "to_step": _spread([i.seconds_to_step for i in outcome.incidents]),
        "phases": _phases(outcome.incidents),
    }


def _spread(values: Sequence[float | None]) -> dict[str, float]:
    known = sorted(v for v in values if v is not None)
    return {"median": statistics.median(known), "min": known[0], "max": known[-1]}


def _phases(incidents: Sequence[IncidentReport]) -> Mapping[str, float]:
    slowest: dict[str, list[float]] = defaultdict(list)
    for incident in incidents:
        names = {r.phase for r in incident.phases}
        for name in names:
            slowest[name].append(max(r.seconds for r in incident.phases if r.phase == name))
    return {name: statistics.median(values) for name, values in slowest.items()}


def torchrun_row(params: str, ranks: int, kills: int) -> dict[str, object]:
    """The baseline: seconds from each kill to the first step afterwards, and to the step that was under work when it happened."""
    every, first = 50, 60
    at = [first + 70 * i for i in range(kills)]
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(kills)]
        command += [JOB, "--directory", directory, "--params", params]
        command += ["--steps", str(at[-1] + 10), "--every", str(every), "--kill", *map(str, at)]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=3600)
        events = [json.loads(line) for line in (Path(directory) / "events.jsonl").read_text().splitlines()]
    to_step, to_lost = [], []
    for index, kill in enumerate(events):
        if kill["event"] != "kill":
            continue
        later = [e for e in events[index + 1 :] if e["event"] == "step"]
        restarted = next(i for i, e in enumerate(later) if e["step"] < kill["step"])
        to_step.append(later[restarted]["at"] - kill["at"])
        to_lost.append(next(e["at"] for e in later[restarted:] if e["step"] > kill["step"]) - kill["at"])
    return {"params": params, "ranks": ranks, "kills": kills, "to_step": _spread(to_step), "to_lost_steps": _spread(to_lost)}


HEADER = "params ranks   resume s  step s (min-max)       torchrun s   ratio   phases (slowest rank, ms)"


def line(row: Mapping[str, Mapping[str, object]]) -> str:
    own, base = row["instep"], row.get("torchrun")
    step: Mapping[str, float] = own["to_step"]  # type: ignore[assignment]
    resume: Mapping[str, float] = own["to_resume"]  # type: ignore[assignment]
    phases: Mapping[str, float] = own["phases"]  # type: ignore[assignment]
    restart = base["to_step"]["median"] if base else float("nan")  # type: ignore[index]
    return (
        f"{own['params']:>6s} {own['ranks']:>5d} {resume['median']:>10.3f} {step['median']:>7.3f} ({step['min']:.3f}-{step['max']:.3f})"
        f" {restart:>14.2f} {restart / step['median']:>7.1f}   " + " ".join(f"{n} {1e3 * s:.0f}" for n, s in phases.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", nargs="+", default=["1M", "25M"], choices=["1M", "25M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--torchrun-kills", type=int, default=2, help="kills of each baseline job; 0 leaves the baseline out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print(HEADER, flush=True)
    for params in args.params:
        for ranks in args.ranks:
            row = {"instep": instep_row(params, ranks, args.kills)}
            if args.torchrun_kills:
                row["torchrun"] = torchrun_row(params, ranks, args.torchrun_kills)
            rows.append(row)
            if not args.json:
                print(line(row), flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
