"""A mkdocs hook: fills the reference pages from the code. ``<!-- generate: NAME -->`` in a page is replaced by what ``NAME`` makes.

It needs no mkdocs itself, so that the tests can hold what it writes against the code. It also puts every decision into the navigation, and
lists the external links of all pages in ``external-links.txt`` of the site: nobody follows them in a build.
"""

import argparse
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from instep.cli.main import COMMANDS
from instep.cli.torchrun import IGNORED, REFUSED, REFUSED_SWITCHES
from instep.config import Config, Table
from instep.discovery import listings
from instep.hooks import HOOKS, Plugin
from instep.testing.contract import MORE

MARK = re.compile(r"^<!-- generate: (\w+) -->$", re.MULTILINE)
_EXTERNAL = re.compile(r"\]\((https?://[^)\s]+)\)")
_links: set[str] = set()


def on_config(config: Any) -> None:
    """Called by mkdocs first: the decisions become the last part of the navigation, the list of them before all."""
    pages = sorted(Path(config.docs_dir, "decisions").glob("[0-9]*.md"))
    config.nav.append({"Decisions": ["decisions/README.md", *(f"decisions/{page.name}" for page in pages)]})
    _links.clear()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page. An unknown name is an error."""
    _links.update(_EXTERNAL.findall(markdown))
    return MARK.sub(lambda match: GENERATORS[match[1]](), markdown)


def on_post_build(config: Any) -> None:
    """Called by mkdocs last."""
    Path(config.site_dir, "external-links.txt").write_text("".join(f"{link}\n" for link in sorted(_links)), encoding="utf-8")


def configuration() -> str:
    """A table of keys for each table of the configuration."""
    top = [name for name in Config.model_fields if not _table(Config, name)]
    parts = ["## Top level {#top-level}\n\n" + _keys(Config, top, prefix="")]
    for name in Config.model_fields:
        table = _table(Config, name)
        if table is not None and name != "drill":  # set by the command alone
            parts.append(f"## `[{name}]` {{#{name}}}\n\n{_first_paragraph(table)}")
            parts.append(_keys(table, list(table.model_fields), prefix=f"{name}."))
    return "\n\n".join(parts)


def commands() -> str:
    """Usage and options of every command."""
    return "\n\n".join(_command(name) for name in COMMANDS)


def hooks() -> str:
    """A table of all hooks in the order of the lifecycle: where each runs, and how answers are combined."""
    rows = ["| hook | runs on | combine |", "|---|---|---|"]
    for name in HOOKS:
        lines = dict(re.findall(r"^\s*([A-Z][a-z ]+): (.+)$", getattr(Plugin, name).__doc__ or "", re.MULTILINE))
        rows.append(f"| [`{name}`][instep.hooks.Plugin.{name}] | {lines['Runs on'].rstrip('.')} | {lines['Combine'].rstrip('.')} |")
    return "\n".join(rows)


def shown() -> str:
    """A table of all hooks: the contract that tests each, and the plugins and examples of this clone that implement it."""
    there = of_this_clone()
    rows = ["| hook | contract | shown by |", "|---|---|---|"]
    for hook in HOOKS:
        contract = MORE.get(hook, "PluginContract")
        by = ", ".join(f"`{name}`" for name, implemented in there.items() if hook in implemented)
        rows.append(f"| [`{hook}`][instep.hooks.Plugin.{hook}] | `{contract}` | {by} |")
    return "\n".join(rows)


def of_this_clone() -> dict[str, tuple[str, ...]]:
    """The hooks of each plugin and example of this clone, by name; whatever else is installed is the reader's own."""
    root = Path(__file__).parents[1]
    own = {file.parent.name for file in [*root.glob("plugins/*/pyproject.toml"), *root.glob("examples/*/pyproject.toml")]}
    return {listing.name: listing.hooks for listing in listings(Config()) if listing.name in own}


def torchrun() -> str:
    """A table of the flags that mean nothing here, and of those that are refused, each with its reason."""
    rows = ["| flag | under `instep run` |", "|---|---|", "| all flags of the [command](../reference/commands.md#run) | work |"]
    rows += [f"| `{flag}` | {_cell(why)} |" for flag, why in sorted(IGNORED.items())]
    rows += [f"| `{flag}` | refused: {_cell(why)} |" for flag, why in sorted((REFUSED | REFUSED_SWITCHES).items())]
    return "\n".join(rows)


def parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    module = import_module(COMMANDS[name].target.partition(":")[0])
    made: argparse.ArgumentParser = module.parser()
    return made


def _table(model: type[BaseModel], name: str) -> type[Table] | None:
    annotation = model.model_fields[name].annotation
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Table)), None)


def _keys(model: type[BaseModel], names: list[str], *, prefix: str) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name in names:
        field = model.model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = json.dumps(list(default) if isinstance(default, tuple) else default)
        rows.append(f"| `{prefix}{name}` | `{shown}` | {field.description} |")
    return "\n".join(rows)


def _first_paragraph(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n", maxsplit=1)[0]


def _command(name: str) -> str:
    made = parser(name)
    usage = made.usage or made.format_usage().removeprefix("usage: ")
    parts = [f"## `instep {name}` {{#{name}}}", f"{made.description}", f"```text\n{' '.join(usage.split())}\n```", _options(made)]
    if made.epilog:
        parts.append(f"```text\n{made.epilog}\n```")
    return "\n\n".join(parts)


def _options(made: argparse.ArgumentParser) -> str:
    rows = ["| option | meaning |", "|---|---|"]
    for group in made._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if shown and group.title not in {"positional arguments", "options"}:
            rows.append(f"| *{group.title}* | {_cell(group.description or '')} |")
        rows += [f"| {_words(action)} | {_cell(action.help or '')} |" for action in shown]
    return "\n".join(rows)


def _words(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    words = ", ".join(f"`{option}`" for option in action.option_strings)
    return words if action.nargs == 0 else f"{words} `{_value(action, metavar)}`"


def _value(action: argparse.Action, metavar: str) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else metavar


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


GENERATORS = {"configuration": configuration, "commands": commands, "hooks": hooks, "shown": shown, "torchrun": torchrun}
