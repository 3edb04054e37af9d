"""Runs the NeMo job as Lightning's tests run theirs: with faults and without, and what each rank ends with and what was logged compared."""

from pathlib import Path

import light_harness

from instep.testing.jobs import Jobs

JOB = str(Path(__file__).with_name("nemo_job.py"))
SETTINGS = {**light_harness.SETTINGS, "preload": ["nemo_warm"], "watchdog.stall": 6.0, "plugins.nemo": True}


class NemoRuns(light_harness.Runs):
    """Runs of four ranks."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        super().__init__(directory, jobs, JOB, ranks=4, settings=SETTINGS)
