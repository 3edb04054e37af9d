"""How often a group can be connected in one process, and what follows when it cannot any more. Imports no torch."""

from collections.abc import Sequence

from instep.model import Unrecoverable, Vote

SWAPS = 245
"""Torch keeps every backend that a group ever had, under a number of one byte of which 249 are free (``instep.torch.plain_handle``)."""


def exhausted(votes: Sequence[Vote], plugin: str) -> Unrecoverable | None:
    """Why recovery in process has to end, if a rank has no swap left."""
    for vote in votes:
        note = vote.notes.get(plugin)
        swaps = note.get("swaps") if isinstance(note, dict) else None
        if isinstance(swaps, int) and swaps >= SWAPS:
            why = f"rank {vote.rank} has connected its NCCL groups {swaps} times, and torch has no room for more in one process"
            return Unrecoverable(incarnation=vote.incarnation, why=f"{why}: the job has to start again")
    return None
