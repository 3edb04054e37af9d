"""Runs a script under a real agent, with and without faults, and compares the two runs bit for bit."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from instep import config, drill
from instep.agent.agent import Launch, Outcome, Server, run, serving
from instep.messages import Injection
from instep.model import IncidentReport
from instep.testing.faults import Faults

DRILL_JOB = "instep.testing.drill_job"
"""A small job of instep's own, as a module: DDP with BatchNorm, dropout, AdamW and a schedule."""


@dataclass(frozen=True)
class JobRun:
    """A finished run: how it ended, the digests that it left step by step, and where each rank's output is (``rank-N.log``)."""

    outcome: Outcome
    trace: drill.Trace
    logs: Path
    placed: tuple[Injection, ...]

    @property
    def incidents(self) -> Sequence[IncidentReport]:
        """All incidents, in order."""
        return self.outcome.incidents

    @property
    def missing(self) -> tuple[Injection, ...]:
        """Faults that never happened."""
        return tuple(i for i in self.placed if i.id not in self.outcome.fired)

    def log(self, rank: int) -> str:
        """What a rank printed, all its births."""
        file = self.logs / f"rank-{rank}.log"
        return file.read_text(errors="replace") if file.exists() else ""


@dataclass(frozen=True)
class Script:
    """What to run: a path, or a module's name, and its arguments; on how many ranks, for how many steps (``None``: to its end)."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    ranks: int = 3
    steps: int | None = 12
    seed: int = 0


class Jobs:
    """Jobs below one directory. The fork server starts with the first of them and serves all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._server: Server | None = None
        self._clean: dict[tuple[Script, str], JobRun] = {}

    def close(self) -> None:
        """End the fork server."""
        self._stack.close()

    def run(self, script: Script, faults: Faults | Iterable[Injection] = (), settings: Mapping[str, object] | None = None) -> JobRun:
        """Run it once. ``settings`` are configuration values by dotted key. Raises what ``instep run`` would."""
        out, placed = Path(tempfile.mkdtemp(dir=self._directory)), tuple(faults)
        drilled = {"drill": {"directory": str(out), "steps": script.steps, "seed": script.seed}}
        launch = Launch(
            script=script.script,
            module=script.module,
            args=script.args,
            nproc=script.ranks,
            config=config.load(overrides={**drilled, **(settings or {})}).config,
            injections=placed,
            log_dir=str(out / "logs"),
            env={"PYTHONHASHSEED": str(script.seed)},
            quiet=True,
        )
        if self._server is None:
            self._server = self._stack.enter_context(serving(launch))
        outcome = run(launch, server=self._server)
        return JobRun(outcome, drill.read(out, script.ranks), out / "logs", placed)

    def clean(self, script: Script, settings: Mapping[str, object] | None = None) -> JobRun:
        """The run without faults, once for each script and settings. Raises ``AssertionError`` if it does not end well."""
        key = script, repr(sorted((settings or {}).items()))
        if key not in self._clean:
            clean = self.run(script, settings=settings)
            if clean.outcome.code or clean.incidents:
                raise AssertionError(
                    f"{script.script} without faults ended with code {clean.outcome.code} and {len(clean.incidents)} incidents: "
                    f"{clean.outcome.message}\n{clean.log(0)[-2000:]}"
                )
            self._clean[key] = clean
        return self._clean[key]

    def drill(self, script: Script, faults: Faults | Iterable[Injection], settings: Mapping[str, object] | None = None) -> JobRun:
        """Run with faults, and require that each of them happened and that the run ends bit for bit as one without.

        Raises ``AssertionError`` that tells the first difference, or the faults that never happened.
        """
        placed = tuple(faults)
        clean, other = self.clean(script, settings), self.run(script, placed, settings)
        story = ", ".join(f"{i.kind} of rank {i.rank} at {i.point} of step {i.step}" for i in placed)
        if other.outcome.code:
            raise AssertionError(f"{story}: ended with code {other.outcome.code}: {other.outcome.message}\n{other.log(0)[-2000:]}")
        if (at := drill.compare(clean.trace, other.trace, resumed=drill.resumed(other.incidents))) is not None:
            raise AssertionError(f"{story}: the run is not the one without faults: {at.name!r} of rank {at.rank} differs at step {at.step}")
        if other.missing:
            raise AssertionError(f"{story}: never happened: {[i.id for i in other.missing]}")
        return other
