"""Plugins that look at every commit, and those that must be closed: the hooks outside of a recovery."""

import logging

from instep.errors import InstepError
from instep.model import Fault
from instep.plugins import LoadedPlugins

log = logging.getLogger(__name__)


class Followers:
    """Calls ``detect``, ``committed`` and ``close`` of all plugins on one rank; nothing is looked up again at each step."""

    def __init__(self, plugins: LoadedPlugins) -> None:
        self._plugins = plugins
        self._detectors = list(plugins.each("detect"))
        self._following = any(True for _ in plugins.each("committed", step=0))

    def detect(self) -> None:
        """Raise what a plugin's ``detect`` found, as a fault of this rank."""
        for plugin, run in self._detectors:
            fault = run()
            if isinstance(fault, Fault):
                raise InstepError(f"plugin {plugin} detected: {fault.detail}")

    def committed(self, step: int) -> None:
        """Tell that ``step`` steps are committed; what a plugin raises is logged."""
        if self._following:
            for plugin, run in self._plugins.each("committed", step=step):
                try:
                    run()
                except Exception:
                    log.exception("plugin %s: committed failed", plugin)

    def close(self) -> None:
        """Close all plugins; what one raises is logged."""
        for plugin, run in self._plugins.each("close"):
            try:
                run()
            except Exception:
                log.exception("plugin %s: close failed", plugin)
