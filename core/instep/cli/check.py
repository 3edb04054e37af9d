"""``instep check``: the whole configuration, each value with its source, and every enabled plugin set up once.

With ``--profile`` also what a profile finds on this machine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instep import config, plugins, profiles
from instep.config import Resolved
from instep.errors import InstepError, UsageError
from instep.profiles import Finding, Inspection

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass
class _Told:
    """All that is to be said."""

    profile: str | None
    resolved: Resolved | None = None
    values: dict[str, tuple[object, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    error: InstepError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and all(finding.status == "ok" for finding in self.findings)


def parser() -> argparse.ArgumentParser:
    """The options of ``instep check``."""
    out = argparse.ArgumentParser(prog="instep check", description="Show each value of the configuration and where it comes from.")
    out.add_argument("file", nargs="?", metavar="FILE", help="the configuration (default: instep.toml or pyproject.toml)")
    out.add_argument("--profile", metavar="NAME", help="also hold this machine against a profile: efa, hyperpod-1.0.0, a plugin's own")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def main(argv: Sequence[str], *, root: Path = Path("/")) -> int:
    """Check a configuration; 2 if it, or a plugin that it enables, is wrong, 1 if a finding of the profile is not ``ok``.

    ``root`` is where a profile finds the machine's files.
    """
    args = parser().parse_args(argv)
    told = _Told(args.profile)
    try:
        _look(told, args.file, root)
    except UsageError:
        raise
    except InstepError as caught:
        told.error = caught
    if args.json:
        print(json.dumps(_report(told), indent=2))
    else:
        _draw(told)
    return 2 if told.error else 0 if told.ok else 1


def _look(told: _Told, file: str | None, root: Path) -> None:
    from instep.agent.channel import inherited
    from instep.agent.environment import given_by, source

    told.resolved = config.load(file)
    told.values.update(_values(told.resolved))
    loaded = plugins.load(told.resolved.config)
    told.values.update(_settings(told.resolved, loaded))
    shell, given = inherited(), given_by(loaded) if told.resolved.config.enabled else {}
    sources = {name: source(name, variable, shell=shell, written=told.resolved.sources) for name, variable in given.items()}
    environ = {name: variable.value for name, variable in given.items()} | shell
    told.values.update({f"environment.{name}": (environ[name], sources[name]) for name in given})
    if told.profile is not None:
        inspection = Inspection(environ, dict.fromkeys(shell, "shell") | sources, loaded, root)
        told.findings += profiles.inspect(told.profile, inspection)


def _values(resolved: Resolved) -> dict[str, tuple[object, str]]:
    out: dict[str, tuple[object, str]] = {}
    for key, source in resolved.sources.items():
        value: object = resolved.config.model_dump(mode="json")
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else value
        out[key] = value, source
    return out


def _settings(resolved: Resolved, loaded: plugins.LoadedPlugins) -> dict[str, tuple[object, str]]:
    """The settings of each plugin, with the plugin's own defaults."""
    out: dict[str, tuple[object, str]] = {}
    for name in loaded.names:
        plugin = loaded.get(name)
        for key, value in plugin.model_dump(mode="json").items() if plugin else ():
            full = f"plugins.{name}.{key}"
            out[full] = value, resolved.sources.get(full, "default")
    return out


def _report(told: _Told) -> dict[str, object]:
    return {
        "ok": told.ok,
        "file": told.resolved.file if told.resolved else None,
        "values": {key: {"value": value, "source": source} for key, (value, source) in sorted(told.values.items())},
        "profile": told.profile,
        "findings": [asdict(finding) for finding in told.findings],
        "errors": str(told.error).splitlines() if told.error else [],
    }


def _draw(told: _Told) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "source"):
        table.add_column(column, overflow="fold")
    for key, (value, source) in sorted(told.values.items()):
        table.add_row(key, json.dumps(value), source, style=None if source == "default" else "bold")
    if told.values and not told.findings:
        console.print(table)
    for finding in told.findings:
        _draw_finding(console, finding)
    if told.error:
        console.print(str(told.error), markup=False, highlight=False, soft_wrap=True, style="red")
        return
    file = told.resolved.file if told.resolved and told.resolved.file else "defaults"
    counts = ", ".join(f"{sum(f.status == status for f in told.findings)} {status}" for status in _COLOURS)
    end = f"; profile {told.profile}: {counts}" if told.profile else ""
    console.print(f"{file}: no errors{end}", markup=False, highlight=False, soft_wrap=True)


def _draw_finding(console: Console, finding: Finding) -> None:
    def line(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)

    line(f"{finding.status:4}  {finding.what}: {finding.value}  ({finding.source})", _COLOURS[finding.status])
    line(f"      {finding.why}")
    if finding.remedy:
        line(f"      remedy: {finding.remedy}", "bold")
