"""Copies in a recovery: a rank restores its own shard groups from its own copies, and sends copies to those who have none."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from instep.errors import InstepError
from instep.hooks import Recovery, SharedState
from instep.model import Role
from instep.torch.overlay import unpack
from instep_state_replica.copies import Copy

Find = Callable[[str, int], Copy | None]
"""The copy of a shard group (by name) at a step, own or kept for another rank."""
Drop = Callable[[str, int], None]
"""Forget such a copy: it is damaged, and must not be voted for again."""


class Served:
    """``hooks.SharedState`` whose donor's part comes from a copy; ``live`` is the group itself where this rank is a replica."""

    def __init__(self, copy: Copy, live: SharedState | None, drop: Drop) -> None:
        self._copy, self._live, self._drop = copy, live, drop
        self.name, self.replicas, self.layouts = copy.name, copy.replicas, copy.layouts

    def describe(self) -> tuple[bytes, Sequence[Tensor]]:
        """See ``hooks.SharedState``. Layouts of buckets that were not known at the commit are those of the live replica."""
        told, tensors = _checked(self._copy, self._drop)
        schema = unpack(told)
        if self._live is not None and any(reducer is None for reducer in schema.reducers):
            told = type(schema)(schema.state, schema.places, unpack(self._live.describe()[0]).reducers).pack()
        return told, tensors

    def present(self) -> tuple[object, list[object]]:
        """See ``hooks.SharedState``."""
        return self._held().present()

    def destination(self, schema: bytes, *, staged: bool) -> Sequence[Tensor]:
        """See ``hooks.SharedState``."""
        return self._held().destination(schema, staged=staged)

    def accept(self) -> None:
        """See ``hooks.SharedState``."""
        self._held().accept()

    def align(self, schema: bytes) -> None:
        """See ``hooks.SharedState``."""
        self._held().align(schema)

    def digest(self) -> int:
        """See ``hooks.SharedState``."""
        return self._held().digest()

    def _held(self) -> SharedState:
        if self._live is None:
            raise InstepError(f"shard group {self.name!r} is not this rank's: it keeps a copy for ranks {list(self.replicas)}")
        return self._live


def shares(recovery: Recovery, find: Find, drop: Drop) -> list[SharedState]:
    """All shard groups that this rank takes part in: its own, and those of which it sends a copy for others."""
    plan, own = recovery.plan, {share.name: share for share in recovery.shards}
    sent = [name for name in plan.copied if recovery.rank in plan.donors[name]]
    served = {name: Served(_found(recovery, name, find), own.get(name), drop) for name in sent}
    return [*(served.get(name, share) for name, share in own.items()), *(s for name, s in served.items() if name not in own)]


def restore(recovery: Recovery, find: Find, drop: Drop) -> int:
    """Bring the shard groups that this rank restores from its own copies to the plan's step. Returns the number of bytes copied.

    The rank is torn from the first byte on, and stays so when it is interrupted; its copies remain what they are.
    """
    plan, total = recovery.plan, 0
    if plan.roles[recovery.rank] is not Role.RESTORE:
        return 0
    for share in recovery.shards:
        if recovery.rank not in plan.donors.get(share.name, ()):
            continue
        recovery.check()
        told, tensors = _checked(_found(recovery, share.name, find), drop)
        landing = share.destination(told, staged=False)
        with torch.no_grad():
            for ours, copied in zip(landing, tensors, strict=True):
                ours.copy_(copied)
        recovery.point("mid_transfer")
        share.accept()
        total += sum(tensor.nbytes for tensor in tensors)
    return total


def _checked(copy: Copy, drop: Drop) -> tuple[bytes, list[Tensor]]:
    try:
        return copy.describe()
    except InstepError:
        drop(copy.name, copy.step)
        raise


def _found(recovery: Recovery, name: str, find: Find) -> Copy:
    copy = find(name, recovery.plan.step)
    if copy is None:
        raise InstepError(f"rank {recovery.rank} has no copy of shard group {name!r} of step {recovery.plan.step}, though it voted for one")
    return copy
