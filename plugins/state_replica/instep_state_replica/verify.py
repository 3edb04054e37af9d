"""All replicas of each shard group compare step and digest, and name those that differ."""

import struct
from collections import defaultdict
from collections.abc import Sequence

from instep.errors import InstepError
from instep.hooks import Recovery
from instep.model import Role
from instep_state_replica.exchange import key

_COUNT = struct.Struct("<I")
_ROW = struct.Struct("<QQq")
"""A rank's word on one shard group: the group's key, the digest, the step."""
_MAJORITY = 3
"""Witnesses from which on a majority tells who is wrong."""


def agree(recovery: Recovery) -> None:
    """Prove that the replicas of each shard group hold equal state at the plan's step.

    Raises:
        InstepError: they do not; the message names the ranks that differ from most, or both sides where there is no majority.
    """
    recovery.point("verify")
    words = _words(recovery)
    names = {key(name): name for name in [*recovery.plan.donors, *(share.name for share in recovery.shards)]}
    faults = [f"shard group {names.get(k, hex(k))!r}: {why}" for k, said in sorted(words.items()) if (why := _differ(said, recovery))]
    faults += [
        f"shard group {share.name!r}: rank {recovery.rank} counts ranks {list(share.replicas)}, it is on ranks {holders}"
        for share in recovery.shards
        if (holders := sorted(words[key(share.name)])) != sorted(share.replicas)
    ]
    if faults:
        raise InstepError(f"after the recovery to step {recovery.plan.step}: {'; '.join(faults)}")


def _words(recovery: Recovery) -> dict[int, dict[int, bytes]]:
    """What each rank says, by shard group. All ranks call ``gather`` once, or twice if one has several groups."""
    own = [_ROW.pack(key(share.name), share.digest(), recovery.plan.step) for share in recovery.shards]
    first = recovery.gather(_COUNT.pack(len(own)) + b"".join(own[:1]).ljust(_ROW.size, b"\0"))
    counts = [int(_COUNT.unpack_from(row)[0]) for row in first]
    said = [bytes(row[_COUNT.size :]) for row in first]
    if (most := max(counts)) > 1:
        more = recovery.gather(b"".join(own[1:]).ljust((most - 1) * _ROW.size, b"\0"))
        said = [one + bytes(rest) for one, rest in zip(said, more, strict=True)]
    words: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
    for rank, (count, rows) in enumerate(zip(counts, said, strict=True)):
        for at in range(0, count * _ROW.size, _ROW.size):
            words[_ROW.unpack_from(rows, at)[0]][rank] = rows[at : at + _ROW.size]
    return words


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
