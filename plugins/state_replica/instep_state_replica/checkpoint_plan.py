"""The rung below peers: when nobody holds a shard group any more, all ranks go back to the newest checkpoint that can be loaded.

Runs in the agent; imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path

from instep.model import Json, Plan, Status, Unrecoverable, Vote
from instep.plan import plan, rollback
from instep_state_replica import checkpoint_files as files
from instep_state_replica.checkpoint import Checkpoint, damaged


def decide(votes: Sequence[Vote], settings: Checkpoint | None, *, plugin: str) -> Plan | Unrecoverable:
    """Core's plan, or one that goes back to a checkpoint. ``plugin`` is under whose name votes carry its notes."""
    made = plan(votes)
    if isinstance(made, Plan):
        return made
    own = made if settings is None else _own(votes, made, settings.path, plugin)
    if isinstance(own, Unrecoverable) and all(_note(vote, plugin, "loads") for vote in votes):
        if none := next((str(note) for vote in votes if (note := _note(vote, plugin, "none"))), ""):
            return own.model_copy(update={"checkpoint": f"{own.checkpoint}; {none}" if own.checkpoint else none})
        # Which step that is only the script can tell.
        far = max(vote.step for vote in votes)
        return rollback(
            votes,
            block=max(vote.block for vote in votes),
            step=far,
            checkpoint=files.OF_SCRIPT,
            skipped=[own.checkpoint] if own.checkpoint else [],
        )
    return own


def _own(votes: Sequence[Vote], made: Unrecoverable, directory: Path, plugin: str) -> Plan | Unrecoverable:
    block, skipped = max(vote.block for vote in votes), list[str]()
    reached = [vote.step + 1 for vote in votes if vote.status is not Status.FRESH]
    for found in files.usable(directory, len(votes), skipped, avoid=damaged((vote.notes for vote in votes), plugin)):
        if found.block != block:
            skipped.append(f"{found.name} is of block {found.block}, the ranks are in block {block}")
        elif reached and found.step > max(reached):
            skipped.append(f"{found.name} is ahead of what the ranks have reached")
        else:
            back = rollback(votes, block=block, step=found.step, checkpoint=found.name, skipped=skipped)
            return back if isinstance(back, Plan) else made.model_copy(update={"checkpoint": f"{found.name} is of no use: {back.why}"})
    why = f"there is none in {directory} that can be loaded" + (f": {'; '.join(skipped)}" if skipped else "")
    return made.model_copy(update={"checkpoint": why})


def _note(vote: Vote, plugin: str, key: str) -> Json:
    note = vote.notes.get(plugin)
    return note.get(key) if isinstance(note, dict) else None
