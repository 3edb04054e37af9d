"""Which Lightning the script uses: ``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

NAMES = ("lightning.pytorch", "pytorch_lightning")

Foreign: TypeAlias = Any
"""An object of Lightning, of whose class more is used than it shows."""
_OLDEST, _NEWEST = (2, 4), (2, 6)

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    def _checked(module: ModuleType) -> ModuleType:
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        if not _OLDEST <= version <= _NEWEST:
            raise ImportError(f"instep-lightning knows the loops of Lightning 2.4 to 2.6, this is {module.__version__}")
        return module

    def _base() -> type:
        for name in sorted(NAMES, key=lambda name: name not in sys.modules):
            try:
                return _checked(importlib.import_module(name)).Callback
            except ModuleNotFoundError as error:
                if error.name is None or not name.startswith(error.name.partition(".")[0]):
                    raise
        raise ModuleNotFoundError("instep-lightning needs Lightning: pip install 'lightning>=2.4,<2.7' (or pytorch-lightning)")

    Callback = _base()

__all__ = ["NAMES", "Callback", "Foreign", "fabric", "own", "part", "root"]


def root(obj: object) -> str:
    """The package that an object of Lightning, or of a subclass, comes from."""
    for cls in type(obj).__mro__:
        for name in NAMES:
            if cls.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"{type(obj).__qualname__} is no class of Lightning")


def part(obj: object, name: str) -> ModuleType:
    """A module of the Lightning that ``obj`` comes from, by its dotted name below the package."""
    return importlib.import_module(f"{root(obj)}.{name}")


def fabric(obj: object, name: str) -> ModuleType:
    """A module of the Fabric that ``obj`` stands on, by its dotted name below the package."""
    below = "lightning.fabric" if root(obj) == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{below}.{name}")


def own(obj: object, function: object) -> bool:
    """Whether a method of ``obj`` is Lightning's own."""
    return str(getattr(function, "__module__", "")).startswith(root(obj))
