"""Runs the Lightning job with faults and without, and compares what each rank ends with, what was logged and what was saved."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from instep.messages import Injection
from instep.testing.faults import Faults
from instep.testing.finals import differing
from instep.testing.jobs import JobRun, Jobs, Script

HERE = Path(__file__).parent
JOB, VARIED = str(HERE / "light_job.py"), str(HERE / "light_varied.py")
SETTINGS: Mapping[str, object] = {
    "preload": ["instep_lightning", "lightning.pytorch"],
    "limits.recoveries_without_commit": 20,
    "limits.same_fault": 50,
    "watchdog.stall": 4.0,
    "plugins.init_gloo.connect_timeout": 30.0,
    "deadlines.connect": 60.0,
    "deadlines.acknowledge": 30.0,
}


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it left."""

    out: Path
    run: JobRun
    finals: list[dict[str, object]]
    logged: list[dict[str, str]]
    saved: list[Path]


class Runs:
    """Runs below one directory, of ``ranks`` if nothing else is said; the clean run of each shape is kept."""

    def __init__(self, directory: Path, jobs: Jobs, job: str = JOB, *, ranks: int = 3, settings: Mapping[str, object] = SETTINGS) -> None:
        self._directory, self._jobs, self._job, self._ranks, self._settings = directory, jobs, job, ranks, settings
        self._clean: dict[tuple[tuple[str, ...], int | None, str], Ended] = {}

    def run(
        self, *args: str, ranks: int | None = None, faults: Faults | Iterable[Injection] = (), settings: Mapping[str, object] = {}
    ) -> Ended:
        """Run the job once, however it ends."""
        out, size = self._directory / str(len(list(self._directory.iterdir()))), ranks or self._ranks
        out.mkdir()
        script = Script(self._job, ("--out", str(out), "--ranks", str(size), *args), ranks=size, steps=None)
        more: dict[str, object] = {"plugins.state_replica": {"buddies": True}} if "buddies" in args else {}
        saving = {"plugins.state_replica.checkpoint": {"dir": str(out / "saved"), "every": 4}} if "--saved" in args else {}
        run = self._jobs.run(script, faults, {**self._settings, **saving, **more, **settings})
        finals = [json.loads(p.read_text()) if (p := out / f"final-{r}.json").exists() else {} for r in range(size)]
        log = out / "log" / "metrics.csv"
        logged = list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []
        return Ended(out, run, finals, logged, sorted((out / "checkpoints").glob("*")))

    def clean(self, *args: str, ranks: int | None = None, settings: Mapping[str, object] = {}) -> Ended:
        """The run without faults."""
        key = args, ranks, repr(settings)
        if key not in self._clean:
            ended = self.run(*args, ranks=ranks, settings=settings)
            assert ended.run.outcome.code == 0, f"{ended.run.outcome.message}\n{ended.run.log(0)[-3000:]}"
            assert all(ended.finals)
            assert ended.logged
            self._clean[key] = ended
        return self._clean[key]

    def check(
        self,
        faults: Faults,
        *args: str,
        ranks: int | None = None,
        scope: str = "in_process",
        settings: Mapping[str, object] = {},
        steps_lost: int = 0,
    ) -> Ended:
        """Run with faults: each happened, and nothing else can be told.

        ``scope``: how far the recoveries had to go. ``steps_lost``: what an incident may cost; with buddies it is one.
        """
        clean = self.clean(*args, ranks=ranks, settings=settings)
        other = self.run(*args, ranks=ranks, faults=faults, settings=settings)
        logs = "\n".join(other.run.log(rank)[-2500:] for rank in range(len(other.finals)))
        assert other.run.outcome.code == 0, f"{other.run.outcome.message}\n{logs}"
        assert not other.run.missing, f"never happened: {other.run.missing}"
        own = [i.fault.detail for i in other.run.incidents if i.fault.kind == "exception" and "injected fault" not in i.fault.detail]
        assert not own, f"faults that nobody placed: {own}\n{logs}"
        differs = differing(clean.finals, other.finals)
        assert not differs, f"{differs}\n{logs}"
        assert other.logged == clean.logged, "what was logged is not what a run without faults logs, each line once"
        assert all(i.scope == scope and i.verified for i in other.run.incidents), other.run.incidents
        most = max(steps_lost, "buddies" in args)
        assert scope != "in_process" or all(i.steps_lost <= most for i in other.run.incidents), other.run.incidents
        return other

    def check_plain(self, *args: str) -> Ended:
        """Run without the callback: it ends, and logs, as the clean run with it."""
        plain, clean = self.run(*args, "--plain"), self.clean(*args)
        assert plain.run.outcome.code == 0, f"{plain.run.outcome.message}\n{plain.run.log(0)[-3000:]}"
        assert plain.finals == clean.finals
        assert plain.logged == clean.logged
        return plain
