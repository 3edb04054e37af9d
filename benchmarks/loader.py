"""What the memory-mapped batch cache costs, and what it saves: ratios within one run, exit code 0 only if every bar holds.

    python benchmarks/loader.py --json
    python benchmarks/loader.py --peers --peer-python /elsewhere/bin/python

Put and get are compared with a copy of as many bytes between memory that no cache holds, throughput with ``DataLoader`` and as many
workers. ``--peers`` adds the first batch after a restart without a cache, in this environment and in those given: minutes, most of it
skipping.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import bars
import torch
from loader_cost import copies, throughput
from loader_restart import closing, new_process, raising, same_process

BARS = {
    "put_over_copy": (2.5, "most"),
    "get_over_copy": (2.0, "most"),
    "throughput_free": (0.85, "least"),
    "throughput_1ms": (0.95, "least"),
    "restart_ms_step_10": (20.0, "most"),
    "restart_ms_step_1000": (20.0, "most"),
    "in_process_ms_step_10": (10.0, "most"),
    "in_process_ms_step_1000": (10.0, "most"),
    "raise_s": (1.0, "most"),
    "close_s": (1.0, "most"),
}
_PATIENCE = 900


def measure(args: argparse.Namespace) -> dict[str, float]:
    """All figures by name."""
    result = copies(args.rounds)
    result["throughput_free"] = throughput(0.0, workers=args.workers, batches=60, rounds=args.rounds)
    result["throughput_1ms"] = throughput(0.001, workers=args.workers, batches=20, rounds=args.rounds)
    for skip in (10, 1000):
        result[f"restart_ms_step_{skip}"] = new_process(skip)
        result[f"in_process_ms_step_{skip}"] = same_process(skip)
    result["raise_s"] = raising()
    result["close_s"] = closing()
    if args.peers:
        for python in (sys.executable, *args.peer_python):
            command = [python, str(Path(__file__).with_name("loader_peers.py"))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_PATIENCE)
            result |= json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1, help="worker processes on both sides")
    parser.add_argument("--peers", action="store_true", help="measure other loaders too")
    parser.add_argument("--peer-python", action="append", default=[], help="interpreter of another environment with peers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args)
    bars.end(result, BARS, as_json=args.json)


if __name__ == "__main__":
    main()
