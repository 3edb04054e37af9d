"""A rank and its buddy: every rank keeps copies of its own state beside the live one, and its buddy a copy of what no other rank holds.

See docs/decisions on buddy copies for why two steps are enough, and when a rank may go on.
"""

from collections.abc import Mapping, Sequence

from instep.errors import InstepError
from instep.hooks import Job, Recovery, SharedState
from instep.model import Address, AddressBook
from instep_state_replica import copies_serve
from instep_state_replica.buddy_receive import Receiver
from instep_state_replica.buddy_send import PORT, Sender, Task
from instep_state_replica.copies import Copy, Look

__all__ = ["PORT", "Buddy", "offset"]


def offset(addresses: Sequence[Address]) -> int:
    """How far a rank's buddy is from it: the smallest distance at which all buddies are on other machines, else one."""
    hosts = [address.host for address in sorted(addresses, key=lambda a: a.rank)]
    world = len(hosts)
    apart = (d for d in range(1, world) if all(hosts[rank] != hosts[(rank + d) % world] for rank in range(world)))
    return next(apart, 1)


class Buddy:
    """``hooks.Kept`` of one rank. ``distance``: ranks from a rank to its buddy, 0 to choose."""

    def __init__(self, job: Job, *, distance: int, connect: float) -> None:
        self._job, self._distance = job, distance
        self._sender = Sender(rank=job.rank, secret=job.secret, connect=connect)
        self._receiver = Receiver(rank=job.rank, secret=job.secret, host=job.host)
        self.ports = {PORT: self._receiver.port}

    def keep(self, step: int, book: AddressBook) -> None:
        """Start with the copies of a step; main has just made it complete. Raises ``InstepError`` when there is no other rank."""
        holding, world = self._job.holding, self._job.world_size
        if holding is None:
            return
        distance = self._distance or offset(book.addresses)
        if distance % world == 0:
            raise InstepError(f"buddy_distance = {distance} makes each of {world} ranks its own buddy; set another one, or 0")
        looks = [Look(share.name, tuple(share.replicas), share.layouts, *share.present()) for share in holding.shards()]
        self._sender.give(Task(step, book, looks), (self._job.rank + distance) % world)

    def settled(self, seconds: float) -> bool:
        """See ``hooks.Kept``."""
        return self._sender.settled(seconds)

    def copies(self) -> Mapping[str, tuple[int, ...]]:
        """See ``hooks.Kept``."""
        self._sender.idle()
        found = {name: set(steps) for name, steps in self._sender.shelf.steps().items()}
        for name, steps in self._receiver.steps().items():
            found.setdefault(name, set()).update(steps)
        return {name: tuple(sorted(steps)) for name, steps in found.items()}

    def find(self, name: str, step: int) -> Copy | None:
        """A copy, own or kept for another rank."""
        return self._sender.shelf.get(name, step) or self._receiver.get(name, step)

    def restore(self, recovery: Recovery) -> tuple[int, Sequence[SharedState]]:
        """Restore what this rank has copies of itself; the bytes of that, and all shard groups that it now takes part in."""
        copied = copies_serve.restore(recovery, self.find, self.drop)
        return copied, copies_serve.shares(recovery, self.find, self.drop)

    def drop(self, name: str, step: int) -> None:
        """Such a copy is damaged."""
        self._sender.shelf.drop(name, step)
        self._receiver.drop(name, step)

    @property
    def sent(self) -> int:
        """Bytes of copies sent to the buddy so far."""
        return self._sender.sent

    @property
    def seconds(self) -> float:
        """What the copies of the last step took, behind the training, until the buddy had them."""
        return self._sender.seconds

    @property
    def memory(self) -> int:
        """Bytes of host memory in all copies."""
        return self._sender.shelf.bytes() + self._receiver.bytes()

    def quiesce(self, incarnation: int) -> None:
        """Nothing of an older incarnation changes a copy any more. Callable from any thread."""
        self._sender.quiesce(incarnation)
        self._receiver.quiesce(incarnation)

    def close(self) -> None:
        """End all threads, and give the memory back."""
        self._sender.close()
        self._receiver.close()
