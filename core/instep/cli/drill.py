"""``instep drill``: run a script with and without faults, and say whether the two runs are bitwise equal."""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from instep import config, drill
from instep.agent.agent import Launch, Outcome, Server, run, serving
from instep.cli.main import BAD_USAGE
from instep.cli.output import show
from instep.cli.run import count
from instep.cli.timeline import counted
from instep.errors import ConfigError, InstepError, PluginError, UsageError
from instep.messages import Injection

DEFAULT_STEPS = 60
DEFAULT_JOB = "instep.testing.drill_job"
_FAULT = re.compile(r"(\d+)@(\d+)")
_FAULT_OPTIONS: dict[str, drill.Kind] = {"--kill": "kill", "--raise": "raise", "--hang": "hang"}
_VALUED = {"--ranks", "--nproc-per-node", "--steps", "--seed", "--backend", "--config", "--report-dir", *_FAULT_OPTIONS}


def parser() -> argparse.ArgumentParser:
    """The options of ``instep drill``; the script and its arguments follow them."""
    out = argparse.ArgumentParser(
        prog="instep drill",
        usage="instep drill [options] [[-m] SCRIPT ARGS ...]",
        description="Run a script twice with one seed, once without faults, and compare the two runs bit for bit.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="R@S is a rank and a step, both from 0; several may follow one option. Without a fault: a kill, an exception\n"
        "and a hang, drawn from the seed. Without a script: a small job of instep's own.\n\n"
        "Where in its step a fault happens is drawn from the seed as well:\n"
        + "\n".join(f"  {name:<12}{where}" for name, where in drill.points().items()),
    )
    out.add_argument(
        "--ranks",
        "--nproc-per-node",
        "--nproc_per_node",
        default="4",
        metavar="N",
        help="ranks to start: a number, cpu, gpu or auto (default 4)",
    )
    out.add_argument("--steps", type=int, help="end the block at this step (default: where the script ends; instep's own job: 60)")
    out.add_argument("--kill", action="append", default=[], metavar="R@S", help="SIGKILL rank R in step S")
    out.add_argument("--raise", action="append", default=[], metavar="R@S", help="raise an exception on rank R in step S")
    out.add_argument("--hang", action="append", default=[], metavar="R@S", help="SIGSTOP rank R in step S")
    out.add_argument("--seed", type=int, default=0, help="seeds the script and the places of the faults (default 0)")
    out.add_argument("--backend", default="gloo", choices=["gloo", "nccl"], help="the backend of the job (default gloo)")
    out.add_argument("--config", metavar="FILE", help="the configuration, as for instep run")
    out.add_argument("--report-dir", metavar="DIR", help="keep the incidents of the run with faults in DIR")
    out.add_argument("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    out.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    return out


def main(argv: Sequence[str]) -> int:
    """Run the drill; 0 only if both runs are bitwise equal and every fault happened, 2 for bad usage."""
    cli = parser()
    options, script = split(argv)
    args = cli.parse_args(options)
    try:
        args.ranks = count(args.ranks, flag="--ranks")
        orders = [order(kind, text) for option, kind in _FAULT_OPTIONS.items() for text in getattr(args, option[2:])]
        with tempfile.TemporaryDirectory(prefix="instep-drill-") as directory:
            return _Drill(args, script, orders, Path(directory)).main()
    except UsageError as error:
        cli.error(str(error))
    except InstepError as error:
        print(f"instep drill: {error}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ConfigError | PluginError) else 1


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options, with one fault after each fault option, and the script with its arguments."""
    options: list[str] = []
    rest = list(argv)
    while rest:
        head = rest.pop(0)
        if head == "--":
            break
        if not head.startswith("-"):
            return options, [head, *rest]
        name, equals, value = head.partition("=")
        head = name.replace("_", "-") + equals + value  # as torchrun takes it
        options.append(head)
        if head in _VALUED and rest:
            options.append(rest.pop(0))
        while head in _FAULT_OPTIONS and rest and _FAULT.fullmatch(rest[0]):
            options += [head, rest.pop(0)]
    return options, rest


def order(kind: drill.Kind, text: str) -> drill.Order:
    """The fault that ``R@S`` asks for. Raises ``UsageError`` when it is not of that form."""
    if not (match := _FAULT.fullmatch(text)):
        raise UsageError(f"--{kind} {text}: expected RANK@STEP, as in --{kind} 2@10")
    return drill.Order(kind=kind, rank=int(match[1]), step=int(match[2]))


class _Drill:
    """The runs of one drill, in one temporary directory."""

    def __init__(self, args: argparse.Namespace, script: Sequence[str], orders: list[drill.Order], directory: Path) -> None:
        self.args, self.orders, self.directory = args, orders, directory
        self.steps: int | None = args.steps if script else args.steps or DEFAULT_STEPS
        self.name: str = script[0] if script else DEFAULT_JOB
        self.module: bool = args.module or not script
        self.script_args = tuple(script[1:])

    def main(self) -> int:
        """Both runs, from one warm fork server, and the verdict."""
        if not self.module and not Path(self.name).is_file():
            raise UsageError(f"no such script: {self.name}")
        drill.check(self.orders, steps=self.steps or sys.maxsize, ranks=self.args.ranks)
        with serving(self.launch()) as server:
            return self.compare(server)

    def compare(self, server: Server) -> int:
        """Run without and with faults; if the two differ, once more without, to see whether the script differs from itself."""
        ranks, seed = self.args.ranks, self.args.seed
        self.say(f"drill of {self.name} on {ranks} ranks, seed {seed}: first without faults")
        outcome, clean = self.run("clean", server)
        if outcome.code or not clean.length:
            return self.refuse(outcome, clean)
        orders = self.orders or drill.selection(steps=clean.length, ranks=ranks, seed=seed)
        drill.check(orders, steps=clean.length, ranks=ranks)
        placed = drill.injections(orders, seed=seed)
        self.say("now with " + ", ".join(f"{i.kind} {i.rank}@{i.step} ({i.point.partition('|')[0]})" for i in placed))
        outcome, other = self.run("faults", server, placed)
        difference = drill.compare(clean, other, resumed=drill.resumed(outcome.incidents))
        deterministic = difference is None or drill.compare(clean, self.run("again", server)[1]) is None
        verdict = drill.Verdict(
            ok=outcome.code == 0 and difference is None and {i.id for i in placed} == set(outcome.fired),
            bitwise_equal=difference is None,
            first_difference=difference,
            deterministic=deterministic,
            steps=other.length,
            incidents=tuple(outcome.incidents),
        )
        return self.tell(verdict, outcome)

    def run(self, name: str, server: Server, injections: Sequence[Injection] = ()) -> tuple[Outcome, drill.Trace]:
        """One run of the script, and what it left behind."""
        traces = self.directory / name
        traces.mkdir()
        outcome = run(self.launch(traces, injections), server=server)
        return outcome, drill.read(traces, self.args.ranks)

    def launch(self, traces: Path | None = None, injections: Sequence[Injection] = ()) -> Launch:
        """One run's settings; without ``traces`` those of the fork server."""
        settings: dict[str, object] = {} if self.args.backend == "gloo" else {"backend": self.args.backend, "plugins.init_nccl": True}
        if traces:
            settings["drill"] = {"directory": str(traces), "steps": self.steps, "seed": self.args.seed}
        return Launch(
            script=self.name,
            module=self.module,
            args=self.script_args,
            nproc=self.args.ranks,
            config=config.load(self.args.config, overrides=settings).config,
            injections=tuple(injections),
            report_dir=self.args.report_dir if injections else None,
            env={"PYTHONHASHSEED": str(self.args.seed)},
            quiet=self.args.json,
        )

    def refuse(self, outcome: Outcome, clean: drill.Trace) -> int:
        """The script cannot be drilled."""
        if outcome.code:
            print(f"instep drill: the run without faults ended with code {outcome.code}: {outcome.message}", file=sys.stderr)
            return 2 if not clean.length else 1
        print(
            f"instep drill: {self.name} committed no step. A drill needs a script that calls instep.init() and commits its steps inside a "
            "recoverable block (see the README); a script without them restarts as a whole, and there is nothing to compare.",
            file=sys.stderr,
        )
        return 2

    def tell(self, verdict: drill.Verdict, outcome: Outcome) -> int:
        """Print the verdict."""
        if self.args.json:
            show(verdict.model_dump_json())
        else:
            show("\n".join(_lines(verdict, outcome)))
        return 0 if verdict.ok else 1

    def say(self, text: str) -> None:
        """One line for a person."""
        if not self.args.json:
            show(text)


def _lines(verdict: drill.Verdict, outcome: Outcome) -> list[str]:
    times = [i.seconds_to_step for i in verdict.incidents if i.seconds_to_step is not None]
    lines = [
        f"{counted(verdict.steps, 'step')}, {counted(len(verdict.incidents), 'incident')}"
        + (f", the next step after at most {max(times):.2f} s" if times else "")
    ]
    if outcome.code:
        lines.append(f"the run with faults ended with code {outcome.code}: {outcome.message}")
    if (at := verdict.first_difference) is not None:
        lines.append(f"NOT equal: the first difference is {at.name!r} of rank {at.rank} at step {at.step}")
        if outcome.code and verdict.deterministic:
            lines.append("which says nothing about the script: that run did not come to its end")
        elif not verdict.deterministic:
            lines.append("but two runs without faults differ as well: the script is not deterministic (an unseeded draw, a clock, a race?)")
        else:
            lines.append(
                "two runs without faults are equal, so the script is deterministic: some state that the loop changes is not protected,"
            )
            lines.append("or changes outside of commits (an optimizer, a schedule, a counter, a generator of its own?)")
    elif verdict.ok:
        lines.append("bitwise equal: every collective and the final state of every rank are those of the run without faults")
    elif not outcome.code:
        lines.append("bitwise equal, but not every fault happened")
    return lines
