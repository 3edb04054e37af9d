"""NVIDIA NeMo under instep: ``Trainer(callbacks=[InstepCallback()], ...)``, or one more callback in a recipe.

NeMo is imported when the callback is asked for, so that this package can be there without it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep_nemo.callback import InstepCallback

__all__ = ["InstepCallback"]


def __getattr__(name: str) -> object:
    """Import the callback. Raises ``UsageError`` that says what is missing, where NeMo is not there or of another version."""
    if name != "InstepCallback":
        raise AttributeError(f"module 'instep_nemo' has no attribute {name!r}")
    from instep_nemo import versions

    versions.check()
    from instep_nemo.callback import InstepCallback

    return InstepCallback
