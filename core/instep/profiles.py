"""Profiles of ``instep check``: what a distribution knows about the machine that its plugin is to run on.

A profile is an entry point of group ``instep.profiles``: a function that is given an ``Inspection`` and yields findings. Like plugins,
profiles are listed from metadata, and only the one that is asked for is imported. It imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal

from instep.config import suggest
from instep.errors import InstepError, PluginError, UsageError
from instep.plugins import LoadedPlugins

GROUP = "instep.profiles"
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    ``source`` is where the value comes from (a file, ``shell``, a place in the configuration), ``why`` what it means for a job, and
    ``remedy`` what to do about it, if anything.
    """

    what: str
    value: str
    source: str
    status: Status
    why: str
    remedy: str | None = None


@dataclass(frozen=True)
class Inspection:
    """What a profile may look at: the machine below ``root``, and the job as the configuration has it.

    ``environ`` is the environment that workers would get, ``sources`` tells where the value of each variable comes from.
    """

    environ: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)
    plugins: LoadedPlugins = field(default_factory=LoadedPlugins)
    root: Path = Path("/")


Profile = Callable[[Inspection], Iterable[Finding]]


def installed() -> Mapping[str, EntryPoint]:
    """The profiles of all installed distributions, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def inspect(name: str, inspection: Inspection) -> list[Finding]:
    """Run one profile.

    Raises:
        UsageError: there is no such profile.
        PluginError: it cannot be imported, or raises.
    """
    there = installed()
    if name not in there:
        near = suggest(name, there, nested=False)
        raise UsageError(f"there is no profile '{name}'; {near} Profiles come with plugins such as instep[init-nccl]")
    entry = there[name]
    try:
        profile: Profile = entry.load()
        return list(profile(inspection))
    except InstepError:
        raise
    except Exception as error:  # foreign code may raise anything
        who = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
        raise PluginError(f"profile '{name}' ({who}, {entry.value}) failed: {type(error).__name__}: {error}") from error
