"""The one configuration: read once, checked as a whole, and each value knows where it comes from.

Explicit overrides win over the environment (``INSTEP_WATCHDOG__STALL=8``), that wins over the file (``instep.toml``, or
``[tool.instep]`` in ``pyproject.toml``), and that over the defaults below. Imports no torch.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from instep.errors import ConfigError
from instep.model import Json

PREFIX = "INSTEP_"
RESERVED = frozenset({"INSTEP_BIRTH", "INSTEP_CHANNEL", "INSTEP_CONFIG"})
"""Variables that are no settings: what the agent tells a worker, and the path of the file."""
DEFAULT_PLUGINS: Mapping[str, Mapping[str, Json] | bool] = {"init_gloo": True, "state_replica": True}

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Times = Annotated[int, Field(ge=1)]


def _switch_or_table(value: object) -> object:
    if isinstance(value, bool | Mapping):
        return value
    raise ValueError("Input should be true, false or a table of settings")


PluginTable = Annotated[Mapping[str, Json] | bool, BeforeValidator(_switch_or_table)]


class Table(BaseModel):
    """Base of all tables: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Deadlines(Table):
    """Seconds that each part of a recovery may take before the attempt counts as failed."""

    acknowledge: Seconds = Field(default=10.0, description="from the notice of a fault until a rank is quiet")
    connect: Seconds = Field(default=10.0, description="connecting all communicators of an incarnation")
    restore: Seconds = Field(default=120.0, description="moving state from donors to replacements")
    resume: Seconds = Field(default=60.0, description="bringing the loaders to the next batch")
    verify: Seconds = Field(default=60.0, description="comparing steps and digests")
    spawn: Seconds = Field(default=30.0, description="from asking for a process until it reports")
    shutdown: Seconds = Field(default=30.0, description="between SIGTERM and SIGKILL")


class Watchdog(Table):
    """When a rank that says nothing counts as hung."""

    enabled: bool = Field(default=True, description="false for debuggers: no rank is ever killed for silence")
    stall: Seconds = Field(default=5.0, description="floor for a rank that shows no activity at all")
    moving: Seconds = Field(default=1800.0, description="for a rank that is active but commits no step")
    startup: Seconds = Field(default=600.0, description="for set-up and the first step after a join")
    tick: Seconds = Field(default=0.05, description="between two looks of the agent at its ranks")


class Limits(Table):
    """When repeating makes no sense any more (circuit breaker)."""

    recoveries_without_commit: Times = Field(default=5, description="recoveries in a row without a committed step")
    same_fault: Times = Field(default=3, description="times that one fault (rank, exception type, step) may come back")


class Drill(Table):
    """Set by ``instep drill``: where each rank leaves its digests, when the run ends, and the seed of every generator."""

    directory: str
    steps: int | None = None
    seed: int = 0


class Config(Table):
    """All settings of a job, the same in the agent and on every rank."""

    enabled: bool = Field(default=True, description="false makes every call a pass-through")
    backend: Literal["gloo", "nccl"] = Field(default="gloo", description="what the default process group runs on; nccl needs init_nccl")
    plugins: Mapping[str, PluginTable] = Field(default=DEFAULT_PLUGINS, description="true, false or a table of settings, by name")
    deadlines: Deadlines = Deadlines()
    watchdog: Watchdog = Watchdog()
    limits: Limits = Limits()
    preload: tuple[str, ...] = Field(default=(), description="further modules that the fork server imports")
    drill: Drill | None = None

    @field_validator("preload", mode="before")
    @classmethod
    def _preload(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Resolved:
    """A configuration, the file it was read from (if any), and the source of each value by its dotted key."""

    config: Config
    sources: Mapping[str, str]
    file: str | None


def load(path: str | None = None, *, overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Resolved:
    """The configuration of this process.

    Args:
        path: the file to read; without it ``INSTEP_CONFIG``, then ``instep.toml``, then ``pyproject.toml`` of the working directory.
        overrides: values that win over everything, nested or with dotted keys (``{"watchdog.enabled": False}``).
        environ: the environment, by default the process's own.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is of the wrong type or out of range.
    """
    environ = os.environ if environ is None else environ
    file, table = _read(path or environ.get("INSTEP_CONFIG"))
    layers = [(_flat(Config().model_dump()), "default")]
    layers += [(_flat(table), str(file))] if file else []
    layers += [({_variable_path(name): _parse(text)}, f"environment {name}") for name, text in sorted(environ.items()) if _is_setting(name)]
    layers += [(_flat(overrides or {}), "override")]
    tree: dict[str, object] = {}
    sources: dict[str, str] = {}
    for values, source in layers:
        for key, value in values.items():
            _set(tree, key.split("."), value)
            sources[key] = source
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, sources))) from None
    final = {key: sources.get(key, "default") for key in _flat(config.model_dump())}
    return Resolved(config=config, sources=final, file=str(file) if file else None)


def _read(path: str | None) -> tuple[Path | None, Mapping[str, object]]:
    candidates = [Path(path)] if path else [p for p in (Path("instep.toml"), Path("pyproject.toml")) if p.is_file()]
    for file in candidates:
        try:
            table: Mapping[str, object] = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not TOML: {error}") from None
        if file.name != "pyproject.toml":
            return file, table
        tool = table.get("tool")
        inner = tool.get("instep") if isinstance(tool, dict) else None
        if isinstance(inner, dict):
            return file, inner
        if path:
            raise ConfigError(f"{file}: has no table [tool.instep]")
    return None, {}


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted keys of all leaves; an empty table is a leaf, since it says that something is wanted with its defaults."""
    out: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _set(tree: dict[str, object], path: list[str], value: object) -> None:
    for part in path[:-1]:
        below = tree.get(part)
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    keeps_table = isinstance(tree.get(path[-1]), dict) and (value is True or value == {})
    if not keeps_table:
        tree[path[-1]] = dict(value) if isinstance(value, Mapping) else value


def _is_setting(name: str) -> bool:
    return name.startswith(PREFIX) and name not in RESERVED


def _variable_path(name: str) -> str:
    return name.removeprefix(PREFIX).lower().replace("__", ".")


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _explain(error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        source = _source(key, sources)
        if item["type"] == "extra_forbidden":
            yield f"{source}: unknown key '{key}'; {suggest(key, _known_keys())}"
        elif item["type"] == "missing":
            yield f"{source}: '{key}' is missing"
        else:
            yield f"{source}: '{key}': {item['msg'].removeprefix('Value error, ')}, not {item['input']!r}"


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where a key that validation complains about was written: itself, a key above it, or one below it."""
    above = [key[:end] for end in range(len(key), 0, -1) if end == len(key) or key[end] == "."]
    below = [known for known in sources if known.startswith(f"{key.rpartition('.')[0] or key}.")]
    written = [sources[k] for k in [*above, *below] if sources.get(k, "default") != "default"]
    return written[0] if written else "configuration"


def suggest(name: str, known: Iterable[str], *, nested: bool = True) -> str:
    """The end of a message about an unknown name: the nearest known one, or those that stand beside it.

    ``nested``: a dot in a name stands between a table and a key in it.
    """
    names = sorted(known)
    if not nested:
        near = difflib.get_close_matches(name, names, n=1)
        return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(names) or 'none'}"
    table, _, last = name.rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in names if k.rpartition(".")[0] == table}
    near = [beside[k] for k in difflib.get_close_matches(last, beside, n=1)] or difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(beside.values() or names) or 'none'}"


def _known_keys() -> list[str]:
    tables = {name: field.annotation for name, field in Config.model_fields.items()}
    nested = [
        f"{name}.{key}" for name, kind in tables.items() if isinstance(kind, type) and issubclass(kind, Table) for key in kind.model_fields
    ]
    return [*tables, *nested, *(f"drill.{key}" for key in Drill.model_fields)]
