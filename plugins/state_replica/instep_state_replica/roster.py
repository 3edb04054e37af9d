"""Who does what for one shard group in a transfer, from the plan and the group's replicas alone."""

from dataclasses import dataclass

from instep.errors import InstepError
from instep.hooks import SharedState
from instep.model import Plan, Role


@dataclass(frozen=True)
class Roster:
    """``primary`` tells the schema to the ``learning`` ranks, ``donors`` send to the ``restoring`` ones; all ascending.

    A rank that restores from its own copy is not among the ``restoring``: it needs nobody.
    """

    primary: int
    donors: tuple[int, ...]
    restoring: tuple[int, ...]
    learning: tuple[int, ...]


def roster(plan: Plan, share: SharedState) -> Roster:
    """The roster of one shard group.

    Raises:
        InstepError: a replica restores, and the plan has no donor for it: the votes named other replicas than this rank does.
    """
    named = plan.donors.get(share.name, ())
    able = named if share.name in plan.copied else tuple(rank for rank in named if plan.roles[rank] is not Role.RESTORE)
    restoring = tuple(rank for rank in share.replicas if plan.roles[rank] is Role.RESTORE and rank not in named)
    donors = able if restoring else ()
    if restoring and not donors:
        raise InstepError(
            f"shard group {share.name!r}: ranks {list(restoring)} restore it, and the plan has no donor; a replacement must protect the "
            "same objects, over the same ranks, as the rank that was lost"
        )
    primary = able[0] if able else share.replicas[0]
    learning = tuple(rank for rank in share.replicas if rank != primary) if share.layouts else restoring
    return Roster(primary, donors, restoring, learning)
