"""Ranks that a signal has stopped and that nobody replaces: said once, since the job stands still without a word meanwhile."""

from collections.abc import Mapping, Sequence

from instep.agent.watchdog import Sight

PATIENCE = 1.0
"""Seconds until all ranks together are spoken of; a single one only that long after the watchdog could have judged it."""


class Stopped:
    """Follows the ranks of a job, tick by tick. ``tick`` and ``stall`` are those of the configuration table ``watchdog``, in seconds."""

    def __init__(self, *, tick: float, stall: float) -> None:
        self._all, self._single = int(PATIENCE / tick), int((stall + PATIENCE) / tick)
        self._ticks: dict[tuple[int, int], int] = {}
        self._told: set[tuple[int, int]] = set()

    def look(self, sights: Sequence[Sight], pids: Mapping[int, int]) -> str:
        """Lines for the console, mostly none. ``pids`` holds the process of each rank in ``sights``."""
        self._ticks = {(s.rank, s.birth): self._ticks.get((s.rank, s.birth), 0) + 1 for s in sights if s.vitals.stopped}
        again = sorted(self._told & {(s.rank, s.birth) for s in sights} - self._ticks.keys())
        patience = self._all if len(self._ticks) == len(sights) else self._single
        new = sorted({birth for birth, ticks in self._ticks.items() if ticks >= patience} - self._told)
        self._told = self._told & self._ticks.keys() | set(new)
        lines = []
        if again:
            lines.append(f"{_named(again)} {'runs' if len(again) == 1 else 'run'} again")
        if new:
            stopped, them = ("is stopped", "it") if len(new) == 1 else ("are stopped", "them")
            command = " ".join(["kill -CONT", *(str(pids[rank]) for rank, _ in new)])
            lines.append(f"{_named(new)} {stopped} by a signal, and the job waits for {them}; to continue {them}: {command}")
        return "\n".join(lines)


def _named(births: Sequence[tuple[int, int]]) -> str:
    return f"rank{'s' if len(births) > 1 else ''} {', '.join(str(rank) for rank, _ in births)}"
