"""Runs the test job with and without faults, and compares what every rank ends with."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from instep import config, drill
from instep.agent.agent import Launch, Outcome, run
from instep.agent.spawner import Server
from instep.messages import Injection
from instep.model import IncidentReport

JOB = Path(__file__).with_name("job.py")
Kind = Literal["kill", "raise", "hang"]
KINDS: tuple[Kind, ...] = ("kill", "raise", "hang")
BEFORE_BARRIER = ("step", "loader", "validation", "mid_forward", "mid_backward", "collective", "record", "prepared")
BEHIND_BARRIER = ("barrier", "body", "amid", "after")
IN_RECOVERY = ("connect", "restore", "mid_transfer", "verify")


@dataclass(frozen=True)
class Fault:
    """A fault of a test; ``step`` may be ``None`` for any step, ``birth`` for any birth of the rank."""

    kind: Kind
    rank: int
    point: str
    step: int | None = None
    birth: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}-{self.rank}-{self.point}@{self.step}"


@dataclass(frozen=True)
class Shape:
    """The job without its faults; equal shapes share one clean run."""

    ranks: int = 3
    steps: int = 12
    workers: int = 0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One finished run: how it ended, the job's own digests of each rank, and the digests that the drill mode wrote."""

    outcome: Outcome
    finals: list[dict[str, object]]
    trace: drill.Trace
    placed: Sequence[Injection] = field(default=())

    @property
    def incidents(self) -> Sequence[IncidentReport]:
        return self.outcome.incidents


class Jobs:
    """Runs jobs below one directory, forked from one warm server, and keeps the clean run of each shape."""

    def __init__(self, directory: Path, server: Server) -> None:
        self._directory, self._server = directory, server
        self._clean: dict[Shape, Run] = {}

    def run(self, shape: Shape, faults: Iterable[Fault] = (), **settings: object) -> Run:
        """Run the job once; ``settings`` are configuration values by dotted key."""
        out = Path(tempfile.mkdtemp(dir=self._directory))
        placed = [
            Injection(id=i, rank=f.rank, kind=f.kind, step=f.step, point=f.point, birth=f.birth) for i, f in enumerate(faults, start=1)
        ]
        values = {
            "drill.directory": str(out),
            "watchdog.stall": 1.0,
            "limits.recoveries_without_commit": 20,
            "limits.same_fault": 20,
            **settings,
        }
        args = ("--out", str(out), "--steps", str(shape.steps), "--workers", str(shape.workers), *shape.extra)
        launch = Launch(
            script=str(JOB),
            args=args,
            nproc=shape.ranks,
            config=config.load(overrides=values).config,
            injections=tuple(placed),
            log_dir=str(out / "logs"),
            quiet=True,
        )
        outcome = run(launch, server=self._server)
        finals = [json.loads(p.read_text()) if (p := out / f"final-{r}.json").exists() else {} for r in range(shape.ranks)]
        return Run(outcome, finals, drill.read(out, shape.ranks), placed)

    def clean(self, shape: Shape) -> Run:
        """The run of this shape without faults."""
        if shape not in self._clean:
            run = self.run(shape)
            assert run.outcome.code == 0, run.outcome.message
            assert all(final["steps"] == shape.steps for final in run.finals)
            assert not run.incidents
            self._clean[shape] = run
        return self._clean[shape]

    def check(self, shape: Shape, faults: Iterable[Fault], *, fired: bool = True, **settings: object) -> Run:
        """Run with faults and require that every one happened and that nothing can be told from a clean run."""
        faults = list(faults)
        clean, run = self.clean(shape), self.run(shape, faults, **settings)
        story = ", ".join(map(str, faults))
        assert run.outcome.code == 0, f"{story}: {run.outcome.message}"
        assert run.finals == clean.finals, f"{story}: {differing(clean, run)}"
        difference = drill.compare(clean.trace, run.trace, resumed=drill.resumed(run.incidents))
        assert difference is None, f"{story}: {difference}"
        assert all(i.scope == "in_process" and i.steps_lost == 0 and i.verified for i in run.incidents), f"{story}: {run.incidents}"
        if fired:
            missing = {i.id for i in run.placed} - set(run.outcome.fired)
            assert not missing, f"{story}: the faults {sorted(missing)} never happened"
        return run


def differing(clean: Run, run: Run) -> list[str]:
    """Rank and name of each final value that differs."""
    return [
        f"rank {rank} {name}"
        for rank, (one, other) in enumerate(zip(clean.finals, run.finals, strict=True))
        for name in one
        if one[name] != other.get(name)
    ]
