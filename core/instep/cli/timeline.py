"""Draws an incident: one bar for each phase, in the order in which they ran."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from instep.model import IncidentReport

WIDTH = 28
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Bar:
    """A phase over all ranks: when it began and how long its slowest rank took, in seconds; bytes of all ranks together."""

    phase: str
    plugin: str
    start: float
    seconds: float
    bytes: int
    ranks: tuple[int, ...]


def bars(incident: IncidentReport) -> list[Bar]:
    """The phases of an incident one after the other; what no receipt accounts for lies before the first."""
    names = list(dict.fromkeys((r.phase, r.plugin) for r in incident.phases))
    parts = [[r for r in incident.phases if (r.phase, r.plugin) == name] for name in names]
    lengths = [max(r.seconds for r in part) for part in parts]
    at = max((incident.seconds_to_resume or 0.0) - sum(lengths), 0.0)
    out = [Bar("detect, unwind", "core", 0.0, at, 0, incident.fault.ranks)] if at > 0 else []
    for (phase, plugin), part, seconds in zip(names, parts, lengths, strict=True):
        ranks = tuple(sorted({r.rank for r in part if r.rank >= 0}))
        out.append(Bar(phase, plugin, at, seconds, sum(r.bytes for r in part), ranks))
        at += seconds
    if incident.seconds_to_step is not None and incident.seconds_to_resume is not None:
        rest = max(incident.seconds_to_step - incident.seconds_to_resume, 0.0)
        out.append(Bar("first step", "script", at, rest, 0, ()))
    return out


def draw(incident: IncidentReport) -> RenderableType:
    """An incident for the terminal: what happened, what became of it, and the bars."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    for justify in ("left", "left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    drawn = bars(incident)
    total = max((bar.start + bar.seconds for bar in drawn), default=0.0) or 1.0
    for bar in drawn:
        moved = size(bar.bytes) if bar.bytes else ""
        table.add_row(f"  {bar.phase}", Text(bar.plugin, "dim"), Text(_bar(bar, total), "cyan"), duration(bar.seconds), moved)
    return Group(*_headline(incident), table)


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def counted(number: int, what: str) -> str:
    """A number of things for people."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _headline(incident: IncidentReport) -> Iterator[Text]:
    fault = incident.fault
    of = f" of rank{'s' if len(fault.ranks) > 1 else ''} {', '.join(map(str, fault.ranks))}" if fault.ranks else ""
    yield Text(f"incident {incident.incident}, {fault.kind}{of}: {fault.detail}", "bold")
    yield Text(f"  {_ending(incident)}")
    lost = f"{counted(incident.steps_lost, 'step')} lost"
    if incident.scope == "in_process":
        yield Text(f"  {lost}; {size(incident.bytes_moved)} moved, {'verified' if incident.verified else 'not verified'}")
    else:
        whole = "the whole job started again" if incident.scope == "job" else "from a checkpoint"
        yield Text(f"  {whole}" + (f"; {lost}" if incident.steps_lost else ""))
    for number, attempt in enumerate(incident.attempts, 1):
        if attempt.failed_phase:
            yield Text(f"  attempt {number} failed in {attempt.failed_phase}: {attempt.fault.detail}", "yellow")


def _ending(incident: IncidentReport) -> str:
    """How far the job came: it may end in the middle of a recovery, or without another step, and a plain script commits none."""
    if incident.seconds_to_resume is None:
        return "not in step again before the job ended"
    where = "running again" if incident.scope == "job" else f"in step again at step {incident.step}"
    since = f"{where} after {duration(incident.seconds_to_resume)}"
    return since + (f", next step after {duration(incident.seconds_to_step)}" if incident.seconds_to_step is not None else "")


def _bar(bar: Bar, total: float) -> str:
    begin = round(bar.start / total * WIDTH * 8)
    length = max(round(bar.seconds / total * WIDTH * 8), 1)
    offset = min(begin // 8, WIDTH - 1)
    full, part = divmod(length, 8)
    return (" " * offset + "█" * full + _EIGHTHS[part]).ljust(WIDTH)[:WIDTH]
