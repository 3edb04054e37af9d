"""``instep check``: the whole configuration, each value with its source, and every enabled plugin set up once."""

import argparse
import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from instep import config, plugins
from instep.config import Resolved
from instep.errors import InstepError


def parser() -> argparse.ArgumentParser:
    """The options of ``instep check``."""
    out = argparse.ArgumentParser(prog="instep check", description="Show each value of the configuration and where it comes from.")
    out.add_argument("file", nargs="?", metavar="FILE", help="the configuration (default: instep.toml or pyproject.toml)")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def main(argv: Sequence[str]) -> int:
    """Check a configuration; 2 if it, or a plugin that it enables, is wrong."""
    args = parser().parse_args(argv)
    resolved: Resolved | None = None
    error: InstepError | None = None
    values: Mapping[str, tuple[object, str]] = {}
    try:
        resolved = config.load(args.file)
        values = _values(resolved)
        values = {**values, **_settings(resolved, plugins.load(resolved.config))}
    except InstepError as caught:
        error = caught
    if args.json:
        print(json.dumps(_report(resolved, values, error), indent=2))
    else:
        _draw(resolved, values, error)
    return 2 if error else 0


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


def _report(resolved: Resolved | None, values: Mapping[str, tuple[object, str]], error: InstepError | None) -> dict[str, object]:
    return {
        "ok": error is None,
        "file": resolved.file if resolved else None,
        "values": {key: {"value": value, "source": source} for key, (value, source) in sorted(values.items())},
        "errors": str(error).splitlines() if error else [],
    }


def _draw(resolved: Resolved | None, values: Mapping[str, tuple[object, str]], error: InstepError | None) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "source"):
        table.add_column(column, overflow="fold")
    for key, (value, source) in sorted(values.items()):
        table.add_row(key, json.dumps(value), source, style=None if source == "default" else "bold")
    if values:
        console.print(table)
    if error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True, style="red")
    elif resolved:
        console.print(f"{resolved.file or 'defaults'}: no errors", markup=False, highlight=False, soft_wrap=True)
