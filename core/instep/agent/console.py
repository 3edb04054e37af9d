"""What a person sees: the ranks' lines with a prefix, a live line of progress, and a timeline after each incident."""

import codecs
import io
from dataclasses import dataclass
from typing import TextIO

from instep.agent.logs import Logs
from instep.model import IncidentReport

_PERIOD = 10.0
_REFRESH = 0.2
_READS = 64
"""Reads of one log in one round, so that a rank that prints without end does not keep the agent busy."""
_ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """Progress of a job: steps that all ranks have committed, and incidents so far."""

    step: int
    incidents: int


class Console:
    """Shows a job on two text streams: the ranks' output on ``out``, everything of the agent on ``err``. ``None`` shows nothing."""

    def __init__(self, logs: Logs, ranks: int, *, out: TextIO | None, err: TextIO | None) -> None:
        self._logs, self._out, self._err = logs, out, err
        self._partial = ["" for _ in range(ranks)]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._live = err is not None and err.isatty()
        self._shown = ""
        self._mark: tuple[float, int] | None = None
        self._due = 0.0

    def say(self, text: str) -> None:
        """A line of the agent itself."""
        if self._err is not None:
            self._above(self._err, "".join(f"instep: {line}\n" for line in text.splitlines()))

    def incident(self, report: IncidentReport) -> None:
        """The timeline of a finished incident."""
        if self._err is None:
            return
        from rich.console import Console as Rich

        from instep.cli.timeline import draw

        text = io.StringIO()
        Rich(file=text, force_terminal=self._live, width=100).print(draw(report))
        self._above(self._err, text.getvalue())

    def poll(self, now: float, status: Status | None) -> None:
        """Show what the ranks wrote, and from time to time how far they are."""
        for rank in range(len(self._partial)):
            for _ in range(_READS):
                if not (data := self._logs.read(rank)):
                    break
                self._lines(rank, data)
        if status is None or self._err is None or now < self._due:
            return
        text = self._progress(now, status)
        if self._live:
            self._due = now + _REFRESH
            self._shown = text
            self._err.write(_ERASE + text)
            self._err.flush()
        elif text:
            self.say(text)

    def end(self) -> None:
        """Show what is left, also lines without an end."""
        self.poll(0.0, None)
        for rank, rest in enumerate(self._partial):
            if rest:
                self._lines(rank, b"\n")
        if self._shown and self._err is not None:
            self._shown = ""
            self._err.write(_ERASE)
            self._err.flush()

    def _progress(self, now: float, status: Status) -> str:
        if self._mark is None:
            self._mark, self._due = (now, status.step), now + _PERIOD
            return ""
        since, step = self._mark
        rate = max(0.0, (status.step - step) / (now - since)) if now > since else 0.0
        if now - since >= _PERIOD or not self._live:
            self._mark, self._due = (now, status.step), now + _PERIOD
        some = "no incidents" if not status.incidents else f"{status.incidents} incident{'s' if status.incidents > 1 else ''}"
        return f"step {status.step}, {rate:.1f} steps/s, {some}"

    def _lines(self, rank: int, data: bytes) -> None:
        text = self._partial[rank] + self._decoders[rank].decode(data)
        *whole, self._partial[rank] = text.split("\n")
        if whole and self._out is not None:
            self._above(self._out, "".join(f"[rank {rank}] {line.rpartition(chr(13))[2] or line}\n" for line in whole))

    def _above(self, stream: TextIO, text: str) -> None:
        if self._shown and self._err is not None:
            self._err.write(_ERASE)
            self._err.flush()
        stream.write(text)
        stream.flush()
        if self._shown and self._err is not None:
            self._err.write(self._shown)
            self._err.flush()
