"""Where reports of incidents go: a line of ``incidents.jsonl``, and the plugins that observe."""

import logging
from pathlib import Path

from instep.errors import ConfigError
from instep.model import IncidentReport
from instep.plugins import LoadedPlugins

log = logging.getLogger(__name__)
FILE = "incidents.jsonl"


class Reports:
    """All reports of a job, in order. ``directory`` is created; without one they stay in memory."""

    def __init__(self, directory: str | None, plugins: LoadedPlugins) -> None:
        self._plugins = plugins
        self.incidents: list[IncidentReport] = []
        self._path: Path | None = None
        if directory is not None:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                self._path = Path(directory) / FILE
                self._path.touch()
            except OSError as error:
                raise ConfigError(f"--report-dir {directory}: cannot be written: {error.strerror}") from error

    def add(self, incident: IncidentReport) -> None:
        """Keep a report, write it down, and show it to the plugins; no failure here reaches the job."""
        self.incidents.append(incident)
        if self._path is not None:
            try:
                with self._path.open("a") as lines:
                    lines.write(incident.model_dump_json() + "\n")
            except OSError as error:
                log.warning("incident %d could not be written to %s: %s", incident.incident, self._path, error)
        for plugin, call in self._plugins.each("report", incident=incident):
            try:
                call()
            except Exception:
                log.warning("plugin %s: report failed", plugin, exc_info=True)
