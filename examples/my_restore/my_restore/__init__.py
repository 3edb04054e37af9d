"""An example of a third party's instep plugin."""

from my_restore.plugin import MyRestore

__all__ = ["MyRestore"]
