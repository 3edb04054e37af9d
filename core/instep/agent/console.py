"""What a person sees: the ranks' lines with a prefix, a live line of progress, and a timeline after each incident."""

import codecs
import io
from collections.abc import Collection
from dataclasses import dataclass
from typing import TextIO

from instep.agent.logs import Logs
from instep.agent.outlet import Outlet
from instep.model import IncidentReport

_PERIOD = 10.0
_REFRESH = 0.2
_READS = 64
"""Reads of one log in one round, so that a rank that prints without end does not keep the agent busy."""
_BACKLOG = 1 << 20
"""Characters that may wait to be written; what the ranks print stays in their logs meanwhile."""
_ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """Progress of a job: steps that all ranks have committed, and incidents so far."""

    step: int
    incidents: int


class Console:
    """Shows a job on two text streams: the ranks' output on ``out``, everything of the agent on ``err``. ``None`` shows nothing.

    The output of ``hidden`` ranks is in their logs only. Nothing here waits for whoever reads, until ``end``. A stream that cannot be
    written any more is given up: the job goes on.
    """

    def __init__(self, logs: Logs, ranks: int, *, out: TextIO | None, err: TextIO | None, hidden: Collection[int] = ()) -> None:
        self._logs, self._out, self._err, self._hidden = logs, out, err, frozenset(hidden)
        self._outlet = Outlet()
        self._partial = ["" for _ in range(ranks)]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._live = err is not None and err.isatty()
        self._shown = ""
        self._mark: tuple[float, int] | None = None
        self._due = 0.0

    def say(self, text: str) -> None:
        """Lines of the agent itself; none for an empty text."""
        if self._err is not None and text:
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
        self._losses()
        self._output()
        if status is None or self._err is None or now < self._due or self._outlet.backlog > _BACKLOG:
            return
        text = self._progress(now, status)
        if self._live:
            self._due = now + _REFRESH
            self._shown = text
            self._outlet.write(self._err, _ERASE + text)
        elif text:
            self.say(text)

    def end(self) -> None:
        """Show what is left, also lines without an end, and wait until it is written."""
        while self._output():
            self._outlet.settle()
        for rank, rest in enumerate(self._partial):
            if rest:
                self._lines(rank, b"\n")
        if self._shown and self._err is not None:
            self._shown = ""
            self._outlet.write(self._err, _ERASE)
        self._outlet.settle()
        self._losses()
        self._outlet.close()

    def _output(self) -> bool:
        """Show what the ranks have printed; false when there was nothing."""
        some = False
        for rank in range(len(self._partial)):
            for _ in range(_READS):
                if self._outlet.backlog > _BACKLOG or not (data := self._logs.read(rank)):
                    break
                self._lines(rank, data)
                some = True
        return some

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
        if whole and self._out is not None and rank not in self._hidden:
            self._above(self._out, "".join(f"[rank {rank}] {line.rpartition(chr(13))[2] or line}\n" for line in whole))

    def _above(self, stream: TextIO, text: str) -> None:
        if self._shown and self._err is not None:
            self._outlet.write(self._err, _ERASE)
        self._outlet.write(stream, text)
        if self._shown and self._err is not None:
            self._outlet.write(self._err, self._shown)

    def _losses(self) -> None:
        """Nobody reads a stream any more, or its disk is full: no reason to end a training."""
        while (failed := self._outlet.failed()) is not None:
            stream, error = failed
            if stream is self._err:
                self._err = None
            if stream is self._out:
                self._out = None
                kept = "their logs keep it" if self._logs.path(0) else "with --log-dir it would be kept"
                self.say(f"the ranks' output cannot be written any more ({error.strerror}); {kept}; the job goes on")
