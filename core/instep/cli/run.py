"""``instep run``: a script on several ranks, with torchrun's flags, kept in step through faults."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from instep import config
from instep.errors import UsageError

_IGNORED = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--master-addr", "--local-addr", "--role")
"""Flags of torchrun with a value that mean nothing on one machine without a rendezvous."""


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
    out.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    for flag in _IGNORED:
        out.add_argument(flag, help=argparse.SUPPRESS)
    out.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    out.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="what to run; everything behind it belongs to it")
    return out


def run(argv: Sequence[str]) -> int:
    """Run a job and return its exit code. Raises ``UsageError`` or ``ConfigError`` before anything starts."""
    args = parser().parse_args(_dashes(argv))
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise UsageError("run: no script given; usage: instep run [options] [-m] SCRIPT ARGS ...")
    _check(script[0], args)
    if ignored := [flag for flag in _IGNORED if getattr(args, flag[2:].replace("-", "_")) is not None]:
        print(f"instep: {', '.join(ignored)}: not needed on one machine, ignored", file=sys.stderr)
    overrides = {"watchdog.enabled": False} if args.no_watchdog else {}
    from instep.agent.agent import Launch
    from instep.agent.agent import run as run_job

    launch = Launch(
        script=script[0],
        module=args.module,
        args=script[1:],
        nproc=ranks(args.nproc_per_node),
        config=config.load(args.config, overrides=overrides).config,
        max_restarts=args.max_restarts,
        report_dir=args.report_dir,
        log_dir=args.log_dir,
        master_port=args.master_port,
        preload=not args.no_preload,
    )
    outcome = run_job(launch)
    if args.json:
        print(json.dumps({"exit": outcome.code, "incidents": len(outcome.incidents), "steps": outcome.steps}), flush=True)
    return outcome.code


def ranks(text: str) -> int:
    """The number of ranks that ``--nproc-per-node`` asks for. Raises ``UsageError`` when it is none."""
    if text in {"gpu", "auto"} and (gpus := _gpus()):
        return gpus
    if text in {"cpu", "auto"}:
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        raise UsageError("--nproc-per-node gpu: this machine shows no NVIDIA GPU (/dev/nvidia0 ...)")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--nproc-per-node {text}: expected a positive number, cpu, gpu or auto")


def _gpus() -> int:
    """GPUs of this machine, told from its device files: the agent never loads a CUDA library."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())


def _dashes(argv: Sequence[str]) -> list[str]:
    """Torchrun's spelling with underscores becomes the one with dashes, up to the script."""
    out: list[str] = []
    valued = {option for action in parser()._actions if action.nargs is None for option in action.option_strings}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "--":
            return [*out, word, *rest]
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        out.append(word)
        if word in valued and rest:
            out.append(rest.pop(0))
    return out


def _check(script: str, args: argparse.Namespace) -> None:
    if args.nnodes not in {"1", "1:1"}:
        raise UsageError(f"--nnodes {args.nnodes}: only one machine is supported so far; run with --nnodes 1, or with torchrun")
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
