"""Layouts: which ranks hold equal copies of which state, and of what size. Told by a job's first commits, or described."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from instep.config import Config
from instep.errors import UsageError
from instep.model import ShardSize, Value

FILE = "layout.json"
"""In a report directory: the layout of the job."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_THIRD = 3
"""Adam keeps two values for each parameter: where only a sum is known, parameters are a third of it."""


class GroupLayout(Value):
    """One shard group: ``bytes`` of one copy, of which each rank in ``replicas`` has one."""

    name: str
    replicas: tuple[int, ...] = Field(min_length=1)
    bytes: int = Field(ge=0)


class Layout(Value):
    """All shard groups of a job of ``ranks`` ranks; ``ranks_per_machine`` is 0 if all are on one. Buddies as in ``state_replica``."""

    ranks: int = Field(ge=1)
    groups: tuple[GroupLayout, ...]
    ranks_per_machine: int = Field(default=0, ge=0)
    buddies: bool = False
    buddy_distance: int = Field(default=0, ge=0)

    @property
    def distance(self) -> int:
        """Ranks from a rank to its buddy."""
        apart = self.ranks_per_machine if self.ranks_per_machine < self.ranks else 0
        return (self.buddy_distance or apart or 1) % self.ranks

    def of(self, rank: int) -> Iterator[GroupLayout]:
        """The groups of a rank."""
        return (group for group in self.groups if rank in group.replicas)


def buddies(config: Config) -> dict[str, int]:
    """What the configuration says about buddy copies, as fields of a layout."""
    table = config.plugins.get("state_replica")
    keys = ("buddies", "buddy_distance")
    return (
        {key: int(str(table[key])) if key != "buddies" else bool(table[key]) for key in keys if key in table}
        if isinstance(table, Mapping)
        else {}
    )


def of_ranks(told: Mapping[int, Mapping[str, ShardSize]], **fields: int) -> Layout:
    """The layout that all ranks of a job told."""
    groups = {
        name: GroupLayout(name=name, replicas=size.replicas, bytes=size.bytes) for rank in sorted(told) for name, size in told[rank].items()
    }
    return Layout(ranks=len(told), groups=tuple(groups.values()), **fields)


def read(path: Path) -> Layout:
    """The layout in a report directory, or in a JSON or TOML file. Raises ``UsageError`` when there is none, or it is wrong."""
    file = path / FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
        if isinstance(raw, dict):
            for group in raw.get("groups", []):
                group["bytes"] = parse_bytes(group["bytes"]) if isinstance(group.get("bytes"), str) else group.get("bytes")
        layout = Layout.model_validate(raw)
    except FileNotFoundError:
        hint = "; a job writes it there when all ranks have committed once" if path.is_dir() else ""
        raise UsageError(f"{file} does not exist{hint}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: no layout: {error}") from None
    return check(layout)


def check(layout: Layout) -> Layout:
    """Raises ``UsageError`` for groups of ranks that do not exist, or with names that come twice."""
    names = [group.name for group in layout.groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two shard groups are called {twice[0]!r}")
    for group in layout.groups:
        if odd := [rank for rank in group.replicas if not 0 <= rank < layout.ranks]:
            raise UsageError(f"shard group {group.name!r} is on rank {odd[0]}; the job has the ranks 0 to {layout.ranks - 1}")
    return layout


def parse_bytes(text: str) -> int:
    """A size such as 1200, 16GB or 1.5T. Raises ``UsageError``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if found is None:
        raise UsageError(f"{text!r} is no size; write one such as 350MB, 16GB or 1.5TB")
    return int(float(found[1]) * _UNITS[found[2]])


def describe(text: str, *, ranks: int | None, size: int) -> Layout:
    """The layout of a kind of training, as ``--layout`` names it; ``size`` are the bytes of all different state together.

    Raises:
        UsageError: there is no such kind, a number is wrong, or it is of another number of ranks.
    """
    kind, _, rest = re.sub(r"[=:]", " ", text, count=1).partition(" ")
    if kind not in KINDS:
        raise UsageError(f"--layout {text}: known are {', '.join(KINDS)}")
    try:
        groups = KINDS[kind](rest, ranks, size)
    except (ValueError, KeyError, ZeroDivisionError):
        raise UsageError(f"--layout {text}: expected {FORMS[kind]}") from None
    found = 1 + max(rank for group in groups for rank in group.replicas)
    if ranks is not None and found != ranks:
        raise UsageError(f"--layout {text} is of {found} ranks, not --ranks {ranks}")
    return Layout(ranks=found, groups=tuple(groups))


def _ddp(rest: str, ranks: int | None, size: int) -> list[GroupLayout]:
    return [_group("replica", range(_plain(rest, ranks)), size)]


def _fsdp(rest: str, ranks: int | None, size: int) -> list[GroupLayout]:
    return _shards(1, _plain(rest, ranks), size)


def _hsdp(rest: str, ranks: int | None, size: int) -> list[GroupLayout]:
    replicas, shards = (int(part) for part in rest.split("x"))
    return _shards(replicas, shards, size)


def _zero1(rest: str, ranks: int | None, size: int) -> list[GroupLayout]:
    world, parameters = _plain(rest, ranks), size // _THIRD
    return [_group("replica", range(world), parameters), *_shards(1, world, size - parameters, what="zero1")]


def _megatron(rest: str, ranks: int | None, size: int) -> list[GroupLayout]:
    numbers = {key: int(value) for key, _, value in (part.partition("=") for part in rest.split(","))}
    tp, pp, dp, instances = (numbers.pop(key, 1) for key in ("tp", "pp", "dp", "instances"))
    if numbers or dp % instances or min(tp, pp, dp, instances) < 1:
        raise ValueError
    out, shards = [], dp // instances
    for stage in range(pp):
        for part in range(tp):
            replicas = [part + tp * (d + dp * stage) for d in range(dp)]
            parameters = size // (tp * pp) // _THIRD
            out.append(_group(f"parameters@{replicas[0]}", replicas, parameters))
            rest_bytes = size // (tp * pp) - parameters
            out += [_group(f"optimizer@{replicas[s]}", replicas[s::shards], rest_bytes // shards) for s in range(shards)]
    return out


def _shards(replicas: int, shards: int, size: int, *, what: str = "shards") -> list[GroupLayout]:
    return [_group(f"{what}@{s}", range(s, replicas * shards, shards), size // shards) for s in range(shards)]


def _group(name: str, replicas: range | list[int], size: int) -> GroupLayout:
    return GroupLayout(name=name, replicas=tuple(replicas), bytes=size)


def _plain(rest: str, ranks: int | None) -> int:
    if rest or not ranks:
        raise ValueError
    return ranks


KINDS: Mapping[str, Callable[[str, int | None, int], list[GroupLayout]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "zero1": _zero1,
    "megatron": _megatron,
}
FORMS: Mapping[str, str] = {
    **dict.fromkeys(("ddp", "fsdp", "zero1"), "no more than the name, and --ranks N"),
    "hsdp": "hsdp=REPLICASxSHARDS, as in hsdp=2x4",
    "megatron": "megatron:tp=T,pp=P,dp=D,instances=K, of which each is 1 unless named, and K divides D",
}
