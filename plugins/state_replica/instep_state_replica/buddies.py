"""Buddy copies as the plugin holds them: there only where they are asked for, and torch is not imported before.

The agent loads this plugin too, and has no torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from instep.hooks import Job, Kept, Recovery, SharedState
from instep.model import AddressBook

if TYPE_CHECKING:
    from instep_state_replica.buddy import Buddy


class Buddies:
    """The copies of one rank, if there are any."""

    def __init__(self) -> None:
        self._buddy: Buddy | None = None

    def open(self, job: Job, *, wanted: bool, distance: int, connect: float) -> Mapping[str, int]:
        """Begin, if it is ``wanted`` and there is another rank; the ports that this needs. See ``buddy.Buddy``."""
        if not wanted or job.world_size == 1:
            return {}
        from instep_state_replica.buddy import Buddy

        self._buddy = Buddy(job, distance=distance, connect=connect)
        return self._buddy.ports

    def keep(self, step: int, book: AddressBook) -> Kept | None:
        """Start with the copies of a step."""
        if self._buddy is not None:
            self._buddy.keep(step, book)
        return self._buddy

    def quiesce(self, incarnation: int) -> None:
        """Nothing of an older incarnation changes a copy any more. Callable from any thread."""
        if self._buddy is not None:
            self._buddy.quiesce(incarnation)

    def restore(self, recovery: Recovery) -> tuple[int, Sequence[SharedState]]:
        """Restore what this rank has copies of itself; the bytes of that, and all shard groups that it now takes part in."""
        return (0, recovery.shards) if self._buddy is None else self._buddy.restore(recovery)

    def close(self) -> None:
        """End all threads, and give the memory back."""
        buddy, self._buddy = self._buddy, None
        if buddy is not None:
            buddy.close()
