"""``instep report``: draws the incidents that a run wrote to its report directory."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError
from rich.console import Console

from instep.cli.timeline import counted, draw, duration, size
from instep.errors import InstepError, UsageError
from instep.model import IncidentReport

FILE = "incidents.jsonl"


class Summary(BaseModel):
    """All incidents of a run, and what they add up to."""

    incidents: tuple[IncidentReport, ...]
    count: int
    median_seconds_to_step: float | None
    max_seconds_to_step: float | None
    steps_lost: int
    bytes_moved: int


def parser() -> argparse.ArgumentParser:
    """The options of ``instep report``."""
    out = argparse.ArgumentParser(prog="instep report", description="Draw the incidents of a run.")
    out.add_argument("directory", metavar="D", help="the --report-dir of a run, or its incidents.jsonl")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def main(argv: Sequence[str]) -> int:
    """Draw the incidents of a report directory, or print them as JSON."""
    args = parser().parse_args(argv)
    summary = summarise(read(Path(args.directory)))
    if args.json:
        print(summary.model_dump_json(indent=2))
    else:
        _draw(summary)
    return 0


def read(path: Path) -> list[IncidentReport]:
    """The incidents in a report directory. A last line that a killed agent left unfinished is passed over with a note.

    Raises:
        UsageError: there is no such file.
        InstepError: a line is no incident.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file} does not exist; give the --report-dir of a run")
    incidents = []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            incidents.append(IncidentReport.model_validate_json(line))
        except ValidationError as error:
            if number == len(lines) and not line.endswith("\n"):
                print(f"instep: {file}:{number} is unfinished: the agent ended while it wrote it", file=sys.stderr)
                break
            first = error.errors()[0]
            raise InstepError(f"{file}:{number}: no incident: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    return incidents


def summarise(incidents: Sequence[IncidentReport]) -> Summary:
    """Count and add up; an incident that never came back to a step has no part in the times."""
    seconds = [i.seconds_to_step for i in incidents if i.seconds_to_step is not None]
    return Summary(
        incidents=tuple(incidents),
        count=len(incidents),
        median_seconds_to_step=statistics.median(seconds) if seconds else None,
        max_seconds_to_step=max(seconds, default=None),
        steps_lost=sum(i.steps_lost for i in incidents),
        bytes_moved=sum(i.bytes_moved for i in incidents),
    )


def _draw(summary: Summary) -> None:
    console = Console(highlight=False)
    if not summary.count:
        console.print("no incidents")
        return
    for incident in summary.incidents:
        console.print(draw(incident))
        console.print()
    median, longest = summary.median_seconds_to_step, summary.max_seconds_to_step
    times = (
        "no step since" if median is None or longest is None else f"to the next step median {duration(median)}, longest {duration(longest)}"
    )
    lost = f"{counted(summary.steps_lost, 'step')} lost"
    console.print(f"{counted(summary.count, 'incident')}, {times}; {lost}, {size(summary.bytes_moved)} moved", soft_wrap=True)
