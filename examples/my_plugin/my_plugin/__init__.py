"""An example of a third party's instep plugin."""

from my_plugin.plugin import MyPlugin

__all__ = ["MyPlugin"]
