"""Where reports of incidents go: a line of ``incidents.jsonl``, and the plugins that observe."""

import logging
from collections.abc import Mapping
from pathlib import Path

from instep.agent.events import Received
from instep.config import Config
from instep.errors import ConfigError
from instep.layouts import FILE as LAYOUT
from instep.layouts import buddies, of_ranks
from instep.messages import Committed
from instep.model import IncidentReport, ShardSize
from instep.plugins import LoadedPlugins

log = logging.getLogger(__name__)
FILE = "incidents.jsonl"


class Reports:
    """All reports of a job, in order. ``directory`` is created; without one they stay in memory."""

    def __init__(self, directory: str | None, plugins: LoadedPlugins, *, world: int, config: Config) -> None:
        self._plugins, self._world, self._buddies = plugins, world, buddies(config)
        self._shards: dict[int, Mapping[str, ShardSize]] = {}
        self.incidents: list[IncidentReport] = []
        self._path: Path | None = None
        if directory is not None:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                self._path = Path(directory) / FILE
                self._path.touch()
            except OSError as error:
                raise ConfigError(f"--report-dir {directory}: cannot be written: {error.strerror}") from error

    def see(self, what: object) -> None:
        """The first commits tell what each rank holds; once all have, ``layout.json`` is there for ``instep plan``."""
        match what:
            case Received(rank, _, Committed(shards=shards)) if shards:
                self._shards[rank] = shards
        if self._path is None or len(self._shards) < self._world:
            return
        layout = of_ranks(self._shards, **self._buddies)
        self._shards = {}
        path = self._path.with_name(LAYOUT)
        try:
            path.with_suffix(".new").write_text(layout.model_dump_json(indent=2) + "\n")
            path.with_suffix(".new").replace(path)
        except OSError as error:
            log.warning("the layout of the job could not be written to %s: %s", path, error)

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
