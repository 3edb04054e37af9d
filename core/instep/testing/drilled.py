"""The law of all plugins that take part in a recovery: a real job, with real faults, ends bit for bit as one without."""

from collections.abc import Mapping
from typing import ClassVar

import pytest

from instep.model import Json
from instep.testing.contract import PluginContract, broken
from instep.testing.faults import Faults
from instep.testing.jobs import DRILL_JOB, JobRun, Jobs, Script
from instep.testing.walk import DEADLINES


class DrilledContract(PluginContract):
    """Adds a drill.

    Attributes:
        script: what is drilled; by default a small DDP job of instep's own. It must use what the plugin is for.
        beside: switches for other plugins, as in the configuration: ``{"state_replica": False}`` for one that takes its place.
    """

    script: ClassVar[Script] = Script(DRILL_JOB, module=True, ranks=3, steps=10)
    beside: ClassVar[Mapping[str, Json]] = {}

    @pytest.fixture(autouse=True)
    def _real(self, job: Jobs) -> None:
        self._jobs = job

    def test_a_real_job_with_faults_ends_as_one_without(self) -> None:
        """A kill, an exception and a hang, on a rank each, with this plugin enabled."""
        self._need_one(("reinit_comms", "restore_state", "resume_data", "verify"))
        faults = Faults().kill(rank=2).at(step=3, phase="backward").raises(rank=1).at(step=5, phase="forward")
        run = self._drill(faults.kill(rank=0).at(step=7, phase="collective"))
        if lost := [i.incident for i in run.incidents if i.steps_lost or i.scope != "in_process"]:
            broken(f"with {self._who} the incidents {lost} lost steps, or were not recovered in process: {run.incidents}")
        self._took_part(run)

    def _drill(self, faults: Faults) -> JobRun:
        plugins: dict[str, object] = {f"plugins.{name}": switch for name, switch in self.beside.items()}
        try:
            return self._jobs.drill(self.script, faults, {**plugins, f"plugins.{self._name}": dict(self.settings)})
        except AssertionError as error:
            broken(f"a drill with {self._who}: {error}")

    def _took_part(self, run: JobRun) -> None:
        """The plugin's own receipts are in the incidents, if it answers a phase that leaves some."""
        phases = {receipt.phase for i in run.incidents for receipt in i.phases if receipt.plugin == self._name}
        for hook in ("reinit_comms", "restore_state", "resume_data"):
            if hook in self.covers and self._has(hook) and hook not in phases:
                broken(f"{self._who} took no part in {hook} of any recovery: another plugin answered, or it said None (see `beside`)")

    def _limit(self, hook: str) -> float:
        return {**DEADLINES, **self.deadlines}[hook]
