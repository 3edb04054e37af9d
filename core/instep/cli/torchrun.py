"""torchrun's flags, so that a command line may be kept: each one works, means nothing here and says so, or is refused with the reason."""

import argparse
import re
from collections.abc import Sequence

from instep.errors import UsageError

OUT, ERR, BOTH = 1, 2, 3
"""The streams that ``--tee`` and ``--redirects`` speak of."""

_ONE_MACHINE = "not needed on one machine, ignored"
IGNORED = {
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr", "--local-addr"), _ONE_MACHINE),
    "--role": _ONE_MACHINE,
    "--monitor-interval": "a death is seen at once, ignored",
    "--start-method": "ranks are forked from a process that has imported torch, or started plain with --no-preload, ignored",
    "--event-log-handler": "incidents go to --report-dir, ignored",
}
"""Flags with a value, and what stands in for them here."""

REFUSED = {
    "--duplicate-stdout-filters": "not supported; --log-dir keeps all that each rank prints",
    "--duplicate-stderr-filters": "not supported; --log-dir keeps all that each rank prints",
    "--logs-specs": "not supported; --log-dir keeps all that each rank prints",
    "--numa-binding": "not supported; bind the job with numactl, or each rank in the script",
    "--signals-to-handle": "not supported; SIGTERM and SIGHUP are forwarded to the ranks, Ctrl-C interrupts them",
}
"""Flags with a value that nothing stands in for."""

REFUSED_SWITCHES = {
    "--no-python": "not supported: a rank is forked from a Python process, so it must be a Python script, or a module with -m",
    "--virtual-local-rank": "not supported: each rank sees every GPU and takes the one of its LOCAL_RANK",
}
_SILENT_SWITCHES = ("--standalone", "--run-path")
"""What they ask for is done anyway."""

_EACH = re.compile(r"[0-3]")
_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


def add(parser: argparse.ArgumentParser) -> None:
    """Add every flag of torchrun that ``instep run`` does not have by itself."""
    group = parser.add_argument_group("torchrun's flags", f"also taken, but not needed: {', '.join([*_SILENT_SWITCHES, *IGNORED])}")
    group.add_argument(
        "-t", "--tee", default="0", metavar="SPEC", help="output to the console and, with --log-dir, to a file: what happens anyway"
    )
    group.add_argument("-r", "--redirects", default="0", metavar="SPEC", help="3, or RANK:3,...: output to the log only (needs --log-dir)")
    group.add_argument("--local-ranks-filter", metavar="R,...", help="show these ranks on the console only (needs --log-dir)")
    group.add_argument("--shutdown-timeout", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL")
    group.add_argument("--node-rank", default="0", help=argparse.SUPPRESS)
    for flag in (*IGNORED, *REFUSED):
        group.add_argument(flag, help=argparse.SUPPRESS)
    for flag in (*_SILENT_SWITCHES, *REFUSED_SWITCHES):
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def check(args: argparse.Namespace) -> list[str]:
    """What to say about the flags that mean nothing here. Raises ``UsageError`` for those that nothing stands in for."""
    for flag, why in (REFUSED | REFUSED_SWITCHES).items():
        if _value(args, flag):
            raise UsageError(f"{flag}: {why}")
    if args.nnodes not in {"1", "1:1"}:
        raise UsageError(f"--nnodes {args.nnodes}: only one machine is supported so far; run with --nnodes 1, or with torchrun")
    if args.node_rank != "0":
        raise UsageError(f"--node-rank {args.node_rank}: only one machine is supported so far, and it is node 0")
    given: dict[str, list[str]] = {}
    for flag, why in IGNORED.items():
        if _value(args, flag) is not None:
            given.setdefault(why, []).append(flag)
    return [f"{', '.join(flags)}: {why}" for why, flags in given.items()]


def console(args: argparse.Namespace, ranks: int) -> tuple[frozenset[int], list[str]]:
    """Ranks whose output is to be kept off the console, and what to say about it.

    A rank's stdout and stderr are one stream, in the order in which it wrote them, so only both together can be taken off. Raises
    ``UsageError`` when output would be kept nowhere at all.
    """
    tee, redirects = (_streams(flag, _value(args, flag), ranks) for flag in ("--tee", "--redirects"))
    hidden = {rank for rank in range(ranks) if redirects[rank] == BOTH and not tee[rank]}
    if (only := args.local_ranks_filter) is not None:
        if not re.fullmatch(r"\d+(,\d+)*", only):
            raise UsageError(f"--local-ranks-filter {only}: expected ranks, as in 0,1")
        hidden |= set(range(ranks)) - {int(rank) for rank in only.split(",")}
    if hidden and args.log_dir is None:
        flag = "--redirects" if only is None else "--local-ranks-filter"
        raise UsageError(f"{flag}: say with --log-dir DIR where the output is kept that the console does not show")
    notes = []
    if any(tee) and args.log_dir is None:
        notes.append("--tee: the console shows all that the ranks print; it is kept in files only with --log-dir DIR")
    if {OUT, ERR} & set(redirects):
        notes.append("--redirects: stdout and stderr of a rank are one stream, which stays on the console; 3 takes both off")
    return frozenset(hidden), notes


def _streams(flag: str, text: object, ranks: int) -> list[int]:
    """What ``--tee`` or ``--redirects`` says for each rank: 0, 1 (stdout), 2 (stderr) or 3 (both)."""
    text = str(text)
    if _EACH.fullmatch(text):
        return [int(text)] * ranks
    if not _BY_RANK.fullmatch(text):
        raise UsageError(f"{flag} {text}: expected 0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:NUMBER,... as in 0:3,1:0")
    by_rank = dict(pair.split(":") for pair in text.split(","))
    return [int(by_rank.get(str(rank), 0)) for rank in range(ranks)]


def _value(args: argparse.Namespace, flag: str) -> object:
    value: object = getattr(args, flag[2:].replace("-", "_"))
    return value


def dashes(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Torchrun's spelling with underscores becomes the one with dashes, up to the script."""
    out: list[str] = []
    valued = {option for action in parser._actions if action.nargs is None for option in action.option_strings}
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
