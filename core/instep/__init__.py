"""Checkpointless recovery for PyTorch distributed training: a lost rank is back in step with its peers, bit for bit."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep.errors import CommsError, ConfigError, GiveUp, InstepError, Interrupted, PluginError, RecoveryFailed, UsageError
    from instep.hooks import Plugin, hookimpl
    from instep.session import Session, init

__version__ = "0.1.0"
__all__ = [
    "CommsError",
    "ConfigError",
    "GiveUp",
    "InstepError",
    "Interrupted",
    "Plugin",
    "PluginError",
    "RecoveryFailed",
    "Session",
    "UsageError",
    "__version__",
    "hookimpl",
    "init",
]

_HOMES = {"Plugin": "instep.hooks", "hookimpl": "instep.hooks", "Session": "instep.session", "init": "instep.session"}


def __getattr__(name: str) -> object:
    """Import a public name where it lives when it is first used, so that ``import instep`` stays quick and free of torch."""
    if name not in __all__:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "instep.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
