"""``instep plan``: which losses a job survives in process, what would be sent by whom, and how long that takes."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from instep import config, forecast, layouts
from instep.cli.report import FILE as INCIDENTS
from instep.cli.report import read as read_incidents
from instep.cli.timeline import counted, duration, size
from instep.errors import InstepError, UsageError
from instep.forecast import Buddies, Forecast
from instep.layouts import GroupLayout, Layout
from instep.model import Value

LOST = 3
"""Exit code when the loss that was asked for, or the loss of some one rank, cannot be survived in process."""
_SHOWN = 16
_TELLING = 1 << 24
"""Bytes of a transfer that tells of bandwidth; smaller ones tell of latency."""


class Answer(Value):
    """All that is told. ``losses`` is the one that was asked for, or that of each rank; ``fatal`` the smallest that are not survivable."""

    ok: bool
    ranks: int
    groups: tuple[GroupLayout, ...]
    losses: tuple[Forecast, ...]
    fatal: tuple[Forecast, ...]
    buddies: Buddies | None
    bandwidth: float | None
    bandwidth_source: str | None


def parser() -> argparse.ArgumentParser:
    """The options of ``instep plan``."""
    out = argparse.ArgumentParser(
        prog="instep plan",
        description="Tell which losses a job survives in process, what would be sent by whom, and how long that takes. "
        f"Exits with {LOST} when the loss is not survivable.",
    )
    out.add_argument("job", nargs="?", metavar="D", help="the --report-dir of a job, running or not, or a JSON or TOML file with a layout")
    out.add_argument("--layout", metavar="L", help="describe one instead: ddp, fsdp, zero1, hsdp=2x4, megatron:tp=2,pp=2,dp=4,instances=2")
    out.add_argument("--ranks", type=int, metavar="N", help="ranks of the described layout")
    out.add_argument("--bytes", metavar="SIZE", help="all its different state together, such as 16GB (default 0)")
    out.add_argument("--lose", metavar="R,R", help="ranks that are lost at once (default: each one alone)")
    out.add_argument("--buddies", action="store_true", default=None, help="with buddy copies (default: as D or the configuration says)")
    out.add_argument("--no-buddies", dest="buddies", action="store_false", help="without buddy copies")
    out.add_argument("--buddy-distance", type=int, metavar="R", help="ranks from a rank to its buddy")
    out.add_argument("--ranks-per-machine", type=int, metavar="N", help="decides where buddies are (default: as D says)")
    out.add_argument("--bandwidth", metavar="SIZE", help="bytes a second of each rank (default: the best that D's incidents show)")
    out.add_argument("--config", metavar="FILE", help="configuration (default: instep.toml, or [tool.instep] in pyproject.toml)")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def main(argv: Sequence[str]) -> int:
    """Judge a loss, or that of each rank; 0 if survivable in process, else ``LOST``."""
    args = parser().parse_args(argv)
    layout = _layout(args)
    bandwidth, source = _bandwidth(args)
    if args.lose is None:
        losses = forecast.singles(layout)
    else:
        losses = [forecast.judge(layout, _ranks(args.lose, layout.ranks), bandwidth=bandwidth)]
    answer = Answer(
        ok=all(loss.survivable for loss in losses),
        ranks=layout.ranks,
        groups=layout.groups,
        losses=tuple(losses),
        fatal=tuple(forecast.fatal(layout)),
        buddies=forecast.cost(layout),
        bandwidth=bandwidth,
        bandwidth_source=source,
    )
    if args.json:
        print(answer.model_dump_json(indent=2))
    else:
        _draw(answer, asked=args.lose is not None)
    return 0 if answer.ok else LOST


def _layout(args: argparse.Namespace) -> Layout:
    if (args.job is None) == (args.layout is None):
        raise UsageError("plan: give a job's report directory, a file with a layout, or --layout")
    if args.job is not None:
        if args.ranks is not None or args.bytes is not None:
            raise UsageError("--ranks and --bytes belong to --layout; a job's layout has them")
        layout = layouts.read(Path(args.job))
    else:
        layout = layouts.describe(args.layout, ranks=args.ranks, size=layouts.parse_bytes(args.bytes or "0"))
        layout = layout.model_copy(update=layouts.buddies(config.load(args.config).config))
    given = {key: getattr(args, key) for key in ("buddies", "buddy_distance", "ranks_per_machine")}
    layout = Layout.model_validate(layout.model_dump() | {key: value for key, value in given.items() if value is not None})
    if layout.buddies and layout.distance == 0:
        raise UsageError(f"--buddy-distance {layout.buddy_distance}: each of {layout.ranks} ranks would be its own buddy")
    return layout


def _bandwidth(args: argparse.Namespace) -> tuple[float | None, str | None]:
    if args.bandwidth is not None:
        if (given := layouts.parse_bytes(args.bandwidth.removesuffix("/s"))) <= 0:
            raise UsageError("--bandwidth must be more than nothing")
        return float(given), "given"
    file = Path(args.job or ".") / INCIDENTS
    if args.job is None or not file.is_file():
        return None, None
    try:
        receipts = [receipt for incident in read_incidents(file) for receipt in incident.phases if receipt.phase == "restore_state"]
    except InstepError as error:
        print(f"instep: no bandwidth from {file}: {error}", file=sys.stderr)
        return None, None
    measured = [receipt.bytes / receipt.seconds for receipt in receipts if receipt.bytes >= _TELLING and receipt.seconds > 0]
    return (max(measured), "measured") if measured else (None, None)


def _ranks(text: str, world: int) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--lose {text}: expected numbers of ranks with commas between them") from None
    if odd := [rank for rank in ranks if not 0 <= rank < world]:
        raise UsageError(f"--lose {text}: there is no rank {odd[0]}; the job has the ranks 0 to {world - 1}")
    return ranks


def _draw(answer: Answer, *, asked: bool) -> None:
    console = Console(highlight=False)

    def line(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, soft_wrap=True, style=style)

    total = size(sum(group.bytes for group in answer.groups))
    line(f"{counted(answer.ranks, 'rank')}, {counted(len(answer.groups), 'shard group')}, {total} of different state")
    if asked:
        _draw_loss(answer.losses[0], answer, line)
    else:
        lost = [loss for loss in answer.losses if not loss.survivable]
        line(f"any one rank: {'not survivable for ' + _few([loss.lose[0] for loss in lost]) if lost else 'survivable'}")
        if lost:
            line(f"  {lost[0].why}")
    together = [loss for loss in answer.fatal if len(loss.lose) > 1]
    for loss in together[:_SHOWN]:
        line(f"not survivable together: {_few(loss.lose)}")
    if len(together) > _SHOWN:
        line(f"  and {len(together) - _SHOWN} more losses of as many ranks")
    if answer.buddies is not None:
        costs = answer.buddies
        line(
            f"buddy copies: each rank's are {costs.distance} further on; at most {size(costs.bytes_per_step)} sent in each step, "
            f"{size(costs.memory)} of host memory"
        )


def _draw_loss(loss: Forecast, answer: Answer, line: Callable[..., None]) -> None:
    if not loss.survivable:
        line(f"losing {_few(loss.lose)}: not survivable in process", "red")
        line(f"  {loss.why}")
        return
    seconds = "" if loss.seconds is None or answer.bandwidth is None else (
        f", about {duration(loss.seconds)} at {size(int(answer.bandwidth))}/s ({answer.bandwidth_source})"
    )  # fmt: skip
    line(
        f"losing {_few(loss.lose)}: survivable, {counted(loss.steps_lost, 'step')} lost at most; {size(loss.bytes)} to send{seconds}",
        "green",
    )
    for move in loss.transfers:
        line(f"  {move.group}: {size(move.bytes)} from {_few(move.senders)} to {_few(move.receivers)}")


def _few(ranks: Sequence[int]) -> str:
    shown = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_SHOWN]))
    return shown + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
