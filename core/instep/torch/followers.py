"""Plugins that look at every commit, that keep copies, and those that must be closed: the hooks outside of a recovery."""

import logging
from collections.abc import Callable, Mapping

from instep.board import Board
from instep.errors import InstepError
from instep.hooks import Kept
from instep.model import AddressBook, Fault
from instep.plugins import LoadedPlugins

log = logging.getLogger(__name__)


class Followers:
    """Calls ``detect``, ``committed``, ``keep`` and ``close`` of all plugins on one rank; nothing is looked up again at each step."""

    def __init__(self, plugins: LoadedPlugins, board: Board, book: Callable[[], AddressBook | None]) -> None:
        self._plugins, self._board, self._book = plugins, board, book
        self._detectors, self._following, self._keeping = (list(plugins.every(hook)) for hook in ("detect", "committed", "keep"))
        self._copying = self._keeping
        self._kept: dict[str, Kept] = {}
        self._failed: InstepError | None = None

    def detect(self) -> None:
        """Raise what a plugin's ``detect`` found, as a fault of this rank."""
        for plugin, run in self._detectors:
            fault = run()
            if isinstance(fault, Fault):
                raise InstepError(f"plugin {plugin} detected: {fault.detail}")

    def committed(self, step: int) -> None:
        """``step`` steps are committed: tell, and have copies made. What a plugin raises in ``committed`` is logged."""
        for plugin, run in self._following:
            try:
                run(step=step)
            except Exception:
                log.exception("plugin %s: committed failed", plugin)
        self._keep(step)

    def keep(self, step: int) -> None:
        """As a block begins, or goes on after a fault: as behind a commit, and find out which plugins keep copies."""
        self._copying = self._keeping
        self._keep(step)
        self._copying = [entry for entry in self._keeping if entry[0] in self._kept or self._failed is not None]

    def _keep(self, step: int) -> None:
        """Have copies made of the state of ``step``, unless a recovery has begun, at whose end it will be; ``settled`` raises."""
        self._failed = None
        if not self._copying or (book := self._book()) is None or self._board.revoked:
            return
        for plugin, run in self._copying:
            try:
                kept = run(step=step, book=book)
            except Exception as error:  # noqa: BLE001 - raised where the rank may fail
                self._failed = InstepError(f"plugin {plugin}: keep failed: {type(error).__name__}: {error}")
                continue
            if kept is not None:
                self._kept[plugin] = kept  # type: ignore[assignment]

    def settled(self, seconds: float) -> bool:
        """Whether all copies are where they must be before this rank may enter a barrier; waits up to ``seconds``."""
        if self._failed is not None:
            raise self._failed
        return all(kept.settled(seconds) for kept in self._kept.values())

    def copies(self) -> Mapping[str, tuple[int, ...]]:
        """The steps of which there are copies here, by shard group."""
        found: dict[str, set[int]] = {}
        for kept in self._kept.values():
            for name, steps in kept.copies().items():
                found.setdefault(name, set()).update(steps)
        return {name: tuple(sorted(steps)) for name, steps in sorted(found.items())}

    def close(self) -> None:
        """Close all plugins; what one raises is logged."""
        for plugin, run in self._plugins.each("close"):
            try:
                run()
            except Exception:
                log.exception("plugin %s: close failed", plugin)
