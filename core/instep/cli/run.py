"""``instep run``: a script on several ranks, with torchrun's flags, kept in step through faults."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from instep import config
from instep.cli import torchrun
from instep.cli.output import show
from instep.errors import UsageError


def parser() -> argparse.ArgumentParser:
    """The options of ``instep run``; the script and its arguments follow them."""
    out = argparse.ArgumentParser(
        prog="instep run",
        usage="instep run [options] [-m] SCRIPT ARGS ...",
        description="Run a training script on several ranks of this machine, and keep it in step through faults.",
        allow_abbrev=False,
    )
    out.add_argument("--nproc-per-node", default="1", metavar="N", help="ranks to start: a number, cpu, gpu or auto (default 1)")
    out.add_argument("--nnodes", default="1", metavar="N", help="machines; only 1 for now")
    out.add_argument(
        "--max-restarts", type=int, default=0, metavar="R", help="restarts of the whole job after a committed step (default 0)"
    )
    out.add_argument("--config", metavar="FILE", help="configuration (default: instep.toml, or [tool.instep] in pyproject.toml)")
    out.add_argument("--report-dir", metavar="DIR", help="write incidents.jsonl into DIR")
    out.add_argument("--log-dir", metavar="DIR", help="keep the output of each rank in DIR/rank-N.log")
    out.add_argument("--no-preload", action="store_true", help="start plain interpreters instead of forking warm ones")
    out.add_argument("--no-watchdog", action="store_true", help="never kill a silent rank (for debuggers)")
    out.add_argument("--master-port", type=int, metavar="PORT", help="MASTER_PORT for the script (default: a free one)")
    out.add_argument("--json", action="store_true", help="end with one line of JSON: exit, incidents, steps")
    out.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    out.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="what to run; everything behind it belongs to it")
    torchrun.add(out)
    return out


def run(argv: Sequence[str]) -> int:
    """Run a job and return its exit code. Raises ``UsageError`` or ``ConfigError`` before anything starts."""
    known = parser()
    args = known.parse_args(torchrun.dashes(argv, known))
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise UsageError("run: no script given; usage: instep run [options] [-m] SCRIPT ARGS ...")
    notes = torchrun.check(args)
    _check(script[0], args)
    nproc = count(args.nproc_per_node, flag="--nproc-per-node")
    hidden, more = torchrun.console(args, nproc)
    for note in notes + more:
        print(f"instep: {note}", file=sys.stderr)
    from instep.agent.agent import Launch
    from instep.agent.agent import run as run_job

    launch = Launch(
        script=script[0],
        module=args.module,
        args=script[1:],
        nproc=nproc,
        config=config.load(args.config, overrides=_overrides(args)).config,
        max_restarts=args.max_restarts,
        report_dir=args.report_dir,
        log_dir=args.log_dir,
        master_port=args.master_port,
        preload=not args.no_preload,
        hidden=hidden,
        announce=not args.json,
    )
    outcome = run_job(launch)
    if args.json:
        show(json.dumps({"exit": outcome.code, "incidents": len(outcome.incidents), "steps": outcome.steps}))
    return outcome.code


def count(text: str, *, flag: str) -> int:
    """The number of ranks that the value of ``flag`` asks for. Raises ``UsageError`` when it is none."""
    from instep.agent.launch import gpus

    if text in {"gpu", "auto"} and (found := gpus()):
        return found
    if text in {"cpu", "auto"}:
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        raise UsageError(f"{flag} gpu: this machine shows no NVIDIA GPU (/dev/nvidia0 ..., CUDA_VISIBLE_DEVICES)")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"{flag} {text}: expected a positive number, cpu, gpu or auto")


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    out: dict[str, object] = {"watchdog.enabled": False} if args.no_watchdog else {}
    if args.shutdown_timeout is not None:
        out["deadlines.shutdown"] = args.shutdown_timeout
    return out


def _check(script: str, args: argparse.Namespace) -> None:
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: cannot be negative")
    if args.module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = find_spec(script)
        except (ImportError, ValueError):
            found = None
        finally:
            del sys.path[0]
        if found is None:
            raise UsageError(f"no module named {script!r}")
    elif not Path(script).exists():
        raise UsageError(f"no such script: {script} (looked in {Path.cwd()})")
