"""All replicas of each shard group compare step and digest, and name those that differ."""

import struct
from collections import defaultdict
from collections.abc import Sequence

from instep.agreement import key, table
from instep.errors import InstepError
from instep.hooks import Recovery
from instep.model import Role

_WORD = struct.Struct("<Qq")
"""A rank's word on one shard group: the digest, the step."""
_MAJORITY = 3
"""Witnesses from which on a majority tells who is wrong."""


def agree(recovery: Recovery) -> None:
    """Prove that the replicas of each shard group hold equal state at the plan's step.

    Raises:
        InstepError: they do not; the message names the ranks that differ from most, or both sides where there is no majority.
    """
    recovery.point("verify")
    own = {key(share.name): _WORD.pack(share.digest(), recovery.plan.step) for share in recovery.shards}
    words = table(recovery.gather, own, size=_WORD.size)
    names = {key(name): name for name in [*recovery.plan.donors, *(share.name for share in recovery.shards)]}
    faults = [f"shard group {names.get(k, hex(k))!r}: {why}" for k, said in sorted(words.items()) if (why := _differ(said, recovery))]
    faults += [
        f"shard group {share.name!r}: rank {recovery.rank} counts ranks {list(share.replicas)}, it is on ranks {holders}"
        for share in recovery.shards
        if (holders := sorted(words[key(share.name)])) != sorted(share.replicas)
    ]
    if faults:
        raise InstepError(f"after the recovery to step {recovery.plan.step}: {'; '.join(faults)}")


def _differ(said: dict[int, bytes], recovery: Recovery) -> str | None:
    """Who differs. Ranks that were restored hold what others gave them: they are no witnesses of who is right."""
    camps: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, word in said.items():
        camps[word].append(rank)
    if len(camps) == 1:
        return None
    restored = [rank for rank in said if recovery.plan.roles[rank] is Role.RESTORE]
    witnesses = [rank for rank in said if rank not in restored] or [*said]
    most = max(camps.values(), key=lambda camp: _count(camp, witnesses))
    known = _count(most, witnesses) == len(witnesses) > 1 or (len(witnesses) >= _MAJORITY and 2 * _count(most, witnesses) > len(witnesses))
    if known:
        return f"ranks {sorted(said.keys() - set(most))} differ from ranks {most}"
    note = f" (ranks {restored} hold what they were given)" if restored else ""
    return " and ".join(f"ranks {camp}" for camp in sorted(camps.values())) + f" differ{note}"


def _count(camp: Sequence[int], witnesses: Sequence[int]) -> int:
    return sum(rank in witnesses for rank in camp)
