"""Which plugins fit this instep: the number of the hook api, and hooks that are going away.

A plugin says for which version of the hooks it was written (``HOOK_API: ClassVar[int] = 1`` in its class). The number grows when a hook
changes in a way that an old plugin would notice; a hook that goes away warns for at least one minor version of instep first.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from instep.hooks import HOOK_API

OLDEST_HOOK_API = 1
"""The oldest version of the hooks for which plugins still work."""


class HookDeprecation(FutureWarning):
    """A plugin implements a hook that is going away. A FutureWarning, since whoever runs the job should see it, not authors alone."""


@dataclass(frozen=True)
class Deprecated:
    """A hook that is going away: deprecated in release ``since``, gone in release ``gone`` (both "major.minor"), and what to use."""

    since: str
    gone: str
    instead: str

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless at least one minor version lies between warning and end."""
        if version(self.gone) <= version(self.since):
            raise ValueError(f"deprecated in {self.since} and gone in {self.gone}: a hook warns for at least one minor version first")

    def tell(self, hook: str) -> str:
        """How a message says it."""
        return f"hook '{hook}' is deprecated since instep {self.since} and gone in {self.gone}; {self.instead}"


DEPRECATED: Mapping[str, Deprecated] = {}
"""Hooks that are going away, by name."""


def version(release: str) -> tuple[int, ...]:
    """Major and minor of a release, for comparison."""
    return tuple(int(part) for part in release.split(".")[:2])


def misfit(api: int | None, *, oldest: int = OLDEST_HOOK_API, newest: int = HOOK_API) -> str | None:
    """Why a plugin written for version ``api`` of the hooks does not fit, ``None`` if it does. Undeclared means the first version."""
    api = 1 if api is None else api
    if oldest <= api <= newest:
        return None
    has = f"has version {newest}" if oldest == newest else f"has the versions {oldest} to {newest}"
    remedy = "upgrade instep" if api > newest else "upgrade the plugin"
    return f"it was written for version {api} of the hooks, this instep {has}; {remedy}, or install versions that fit"


def warn_deprecated(name: str, hooks: Iterable[str], *, deprecated: Mapping[str, Deprecated] = DEPRECATED) -> None:
    """Warn of each of a plugin's hooks that is going away; ``name`` is how messages call the plugin."""
    for hook in hooks:
        if (entry := deprecated.get(hook)) is not None:
            warnings.warn(f"{name}: {entry.tell(hook)}", HookDeprecation, stacklevel=2)
