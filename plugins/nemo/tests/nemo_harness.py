"""Runs the NeMo job with faults and without, and compares what each rank ends with and what was logged."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from instep.messages import Injection
from instep.testing.faults import Faults
from instep.testing.finals import differing
from instep.testing.jobs import JobRun, Jobs, Script

JOB = str(Path(__file__).with_name("nemo_job.py"))
RANKS = 4
SETTINGS = {
    "preload": ["nemo_warm"],
    "limits.recoveries_without_commit": 20,
    "limits.same_fault": 50,
    "watchdog.stall": 6.0,
    "plugins.nemo": True,
    "plugins.init_gloo.connect_timeout": 30.0,
    "deadlines.connect": 60.0,
    "deadlines.acknowledge": 30.0,
}


@dataclass(frozen=True)
class NemoEnded:
    """How a run ended, and what it left."""

    run: JobRun
    finals: list[dict[str, object]]
    logged: list[dict[str, str]]


class NemoRuns:
    """Runs below one directory; the clean run of each shape is kept."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        self._directory, self._jobs = directory, jobs
        self._clean: dict[tuple[tuple[str, ...], str], NemoEnded] = {}

    def run(self, *args: str, faults: Faults | Iterable[Injection] = (), settings: Mapping[str, object] = {}) -> NemoEnded:
        """Run the job once, however it ends."""
        out = self._directory / str(len(list(self._directory.iterdir())))
        out.mkdir()
        script = Script(JOB, ("--out", str(out), "--ranks", str(RANKS), *args), ranks=RANKS, steps=None)
        run = self._jobs.run(script, faults, {**SETTINGS, **settings})
        finals = [json.loads(p.read_text()) if (p := out / f"final-{r}.json").exists() else {} for r in range(RANKS)]
        log = out / "log" / "metrics.csv"
        return NemoEnded(run, finals, list(csv.DictReader(log.read_text().splitlines())) if log.exists() else [])

    def clean(self, *args: str, settings: Mapping[str, object] = {}) -> NemoEnded:
        """The run without faults."""
        key = args, repr(settings)
        if key not in self._clean:
            ended = self.run(*args, settings=settings)
            assert ended.run.outcome.code == 0, f"{ended.run.outcome.message}\n{ended.run.log(0)[-3000:]}"
            assert all(ended.finals)
            assert ended.logged
            self._clean[key] = ended
        return self._clean[key]

    def check(self, faults: Faults, *args: str, settings: Mapping[str, object] = {}, steps_lost: int = 0) -> NemoEnded:
        """Run with faults: each happened, and nothing else can be told. ``steps_lost`` is what an incident may cost."""
        clean, other = self.clean(*args, settings=settings), self.run(*args, faults=faults, settings=settings)
        logs = "\n".join(other.run.log(rank)[-2500:] for rank in range(RANKS))
        assert other.run.outcome.code == 0, f"{other.run.outcome.message}\n{logs}"
        assert not other.run.missing, f"never happened: {other.run.missing}"
        own = [i.fault.detail for i in other.run.incidents if i.fault.kind == "exception" and "injected fault" not in i.fault.detail]
        assert not own, f"faults that nobody placed: {own}\n{logs}"
        differs = differing(clean.finals, other.finals)
        assert not differs, f"{differs}\n{logs}"
        assert other.logged == clean.logged, "what was logged is not what a run without faults logs, each line once"
        assert all(i.scope == "in_process" and i.verified and i.steps_lost <= steps_lost for i in other.run.incidents), other.run.incidents
        return other
