"""When to stop trying: the circuit breaker for recoveries, and the budget of whole-job restarts."""

from collections import Counter

from instep.model import Fault

FREE_RESTARTS = 3


class Breaker:
    """Counts recoveries that led nowhere, and faults that look alike; several in one recovery are one that looks alike."""

    def __init__(self, *, recoveries: int, same: int) -> None:
        """Trip after ``recoveries`` without a newly committed step, or at the ``same``-th fault that looks the same."""
        self._recoveries, self._same = recoveries, same
        self._count = 0
        self._newest = -1
        self._seen: Counter[str] = Counter()
        self._in_step = True

    def in_step(self) -> None:
        """All ranks are in step again: the next fault that looks like the last one did come back."""
        self._in_step = True

    def fault(self, fault: Fault, step: int) -> str | None:
        """Count a fault that opens an attempt when all ranks have committed ``step`` steps; why to stop, or ``None``."""
        if step > self._newest:
            self._newest, self._count = step, 0
            self._seen.clear()
        self._count += 1
        # A bug that all ranks have may be raised by another one first each time: its text tells.
        looks = {look for look in (fault.signature, f"{fault.kind}: {fault.detail}") if fault.signature}
        self._seen.update(look for look in looks if self._in_step or look not in self._seen)
        self._in_step = False
        times = max((self._seen[look] for look in looks), default=0)
        ranks = ", ".join(map(str, fault.ranks)) or "(unknown)"
        if times >= self._same:
            return (
                f"the same fault happened {times} times on rank {ranks} at step {step}: {fault.detail}. "
                "This is a bug that comes back, not an accident; correct it (what it printed is in the log of that rank) and start again"
            )
        if self._count > self._recoveries:
            return (
                f"{self._recoveries} recoveries in a row did not lead to a committed step (rank {ranks}, step {step}); the last fault: "
                f"{fault.detail}. Look for its cause in the log of that rank, or raise limits.recoveries_without_commit"
            )
        return None


class Budget:
    """How often the whole job may start again."""

    def __init__(self, max_restarts: int) -> None:
        self._free = FREE_RESTARTS
        self._left = self._max = max_restarts

    def progress(self) -> None:
        """A step was committed: the next start that fails is the first of a new row."""
        self._free = FREE_RESTARTS

    def take_free(self) -> str | None:
        """Use one of the restarts that lose nothing; why not, or ``None``."""
        if self._free == 0:
            return f"it was started {FREE_RESTARTS + 1} times without committing a step"
        self._free -= 1
        return None

    def take(self) -> str | None:
        """Use one of the restarts that lose committed steps; why not, or ``None``."""
        if self._left <= 0:
            return f"--max-restarts {self._max} allows none" if self._max == 0 else f"all of --max-restarts {self._max} are used"
        self._left -= 1
        return None
