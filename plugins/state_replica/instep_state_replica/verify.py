"""All ranks compare step and digest of their shared state, and name those that differ."""

import struct
from collections import defaultdict

from instep.errors import InstepError
from instep.hooks import Recovery

_WORD = struct.Struct("<Qq")
_MAJORITY = 3
"""Ranks from which on a majority tells who is wrong."""


def agree(recovery: Recovery) -> None:
    """Prove that all ranks hold equal shared state at the plan's step.

    Raises:
        InstepError: they do not; the message names the ranks that differ from most, or both sides where there is no majority.
    """
    recovery.point("verify")
    own = _WORD.pack(recovery.state.digest(), recovery.plan.step)
    camps: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, word in enumerate(recovery.gather(own)):
        camps[bytes(word)].append(rank)
    if len(camps) == 1:
        return
    largest, *others = sorted(camps.values(), key=len, reverse=True)
    ranks = sum(len(camp) for camp in camps.values())
    odd = sorted(rank for camp in others for rank in camp)
    if ranks >= _MAJORITY and len(largest) > ranks / 2:
        who = f"ranks {odd} differ from ranks {largest}"
    else:
        who = " and ".join(f"ranks {camp}" for camp in sorted(camps.values())) + " differ"
    raise InstepError(f"shared state after the recovery to step {recovery.plan.step}: {who}")
