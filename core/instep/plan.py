"""``plan``: the pure function from all votes of an incarnation to what every rank does next."""

from collections.abc import Mapping, Sequence

from instep.model import AddressBook, Plan, Role, Status, Unrecoverable, Vote

_HOLDS = {Status.CLEAN: 0, Status.PREPARED: 0, Status.UNPUB: 0, Status.APPLIED: 1}
"""Steps beyond the vote's own that a rank holds already."""


def held(vote: Vote) -> tuple[int, int] | None:
    """The newest (block, step) that a rank holds completely, ``None`` for torn and fresh ones."""
    extra = _HOLDS.get(vote.status)
    return None if extra is None else (vote.block, vote.step + extra)


def role(vote: Vote, block: int, step: int) -> Role:
    """What a rank must do to stand at the target."""
    if held(vote) == (block, step):
        return Role.KEEP
    if vote.status is Status.PREPARED and (vote.block, vote.step + 1) == (block, step):
        return Role.ROLL_FORWARD
    return Role.RESTORE


def plan(votes: Sequence[Vote]) -> Plan | Unrecoverable:
    """The plan for the votes of one incarnation, one vote a rank, whatever their order.

    The target is the highest step that some rank holds; prepared ranks roll forward iff the target is one ahead of them. Every
    rank that is not at the target restores each of its shard groups from all replicas that are. What no replica holds there comes from
    copies, and if there is none of that step, all ranks go back to the one before, of which each has its own copies. Raises nothing.
    """
    ordered = sorted(votes, key=lambda v: v.rank)
    incarnation, copies = ordered[0].incarnation, _copies(ordered)
    points = [point for vote in ordered if (point := held(vote)) is not None]
    if not points and not copies:
        return Unrecoverable(incarnation=incarnation, why=f"no rank holds a complete step ({_census(ordered)})")
    block = max(points)[0] if points else max(v.block for v in ordered)
    newest = max([step for at, step in points if at == block] + [*copies])
    behind = [v.rank for v in ordered if v.block != block]
    if behind:
        return Unrecoverable(incarnation=incarnation, why=f"ranks {behind} are not in block {block} ({_census(ordered)})")
    why = _different_groups(ordered) or _different_replicas(ordered)
    if why:
        return Unrecoverable(incarnation=incarnation, why=why)
    for step in [newest, newest - 1] if newest - 1 in copies else [newest]:
        roles = tuple(role(vote, block, step) for vote in ordered)
        found = _donors(ordered, roles, step, copies.get(step, {}))
        if not isinstance(found, str):
            donors, copied = found
            return Plan(incarnation=incarnation, block=block, step=step, roles=roles, donors=donors, copied=copied, book=_book(ordered))
        why = f"{why}; one step back, {found}" if why else found
    return Unrecoverable(incarnation=incarnation, why=f"{why} ({_census(ordered)})")


def rollback(votes: Sequence[Vote], *, block: int, step: int, checkpoint: str, skipped: Sequence[str] = ()) -> Plan | Unrecoverable:
    """The plan by which all ranks go back to a checkpoint of ``step`` in ``block``, when no plan can be made from what they hold."""
    ordered = sorted(votes, key=lambda v: v.rank)
    incarnation = ordered[0].incarnation
    if elsewhere := [v.rank for v in ordered if v.block != block]:
        why = f"checkpoint {checkpoint} was saved in block {block}, ranks {elsewhere} are in another one ({_census(ordered)})"
        return Unrecoverable(incarnation=incarnation, why=why)
    if why := _different_groups(ordered) or _different_replicas(ordered) or "":
        return Unrecoverable(incarnation=incarnation, why=why)
    return Plan(
        incarnation=incarnation,
        block=block,
        step=step,
        roles=(Role.RESTORE,) * len(ordered),
        donors={},
        book=_book(ordered),
        checkpoint=checkpoint,
        skipped=tuple(skipped),
    )


def _book(votes: Sequence[Vote]) -> AddressBook:
    incarnation = votes[0].incarnation
    return AddressBook(incarnation=incarnation, addresses=tuple(v.address for v in votes), notes=tuple(v.notes for v in votes))


def _copies(votes: Sequence[Vote]) -> Mapping[int, Mapping[str, tuple[int, ...]]]:
    """Who keeps a copy, by step and shard group."""
    found: dict[int, dict[str, list[int]]] = {}
    for vote in votes:
        for name, steps in vote.copies.items():
            for step in steps:
                found.setdefault(step, {}).setdefault(name, []).append(vote.rank)
    return {step: {name: tuple(ranks) for name, ranks in names.items()} for step, names in found.items()}


def _donors(
    votes: Sequence[Vote], roles: Sequence[Role], step: int, copies: Mapping[str, tuple[int, ...]]
) -> tuple[Mapping[str, tuple[int, ...]], tuple[str, ...]] | str:
    """Who sends each shard group, and which of them from copies; or which group nobody can send."""
    donors: dict[str, tuple[int, ...]] = {}
    alone: dict[str, list[int]] = {}
    drawn: set[str] = set()
    by_rank = {vote.rank: role for vote, role in zip(votes, roles, strict=True)}
    able: tuple[int, ...] = ()
    last: tuple[int, ...] | None = None
    for vote, own in zip(votes, roles, strict=True):
        for name, replicas in vote.shards.items():
            if own is not Role.RESTORE:
                donors.setdefault(name, ())
                continue
            if replicas != last:  # most ranks name the same replicas as the one before
                last, able = replicas, tuple(r for r in sorted(replicas) if by_rank[r] is not Role.RESTORE)
            if not able and name not in copies:
                none = f", and nobody keeps a copy of step {step}" if any(v.copies for v in votes) else ""
                return f"shard group {name!r} of rank {vote.rank} has no replica left among ranks {list(replicas)}{none}"
            donors[name] = able
            if step in vote.copies.get(name, ()):
                alone.setdefault(name, []).append(vote.rank)
            else:
                drawn.add(name)
    copied = tuple(sorted(name for name in alone.keys() | drawn if not donors[name]))
    for name in copied:
        donors[name] = copies[name] if name in drawn else tuple(alone[name])
    for name, ranks in alone.items():
        donors[name] = tuple(sorted({*donors[name], *ranks}))
    return donors, copied


def _different_groups(votes: Sequence[Vote]) -> str | None:
    made: dict[tuple[str, str], list[tuple[tuple[int, ...], set[int]]]] = {}
    for vote in votes:
        for group in vote.groups:
            alike = made.setdefault((group.name, group.backend), [])
            members = next((m for ranks, m in alike if ranks is group.ranks or ranks == group.ranks), None)
            if members is None:
                alike.append((group.ranks, members := set()))
            members.add(vote.rank)
    for (name, _backend), alike in made.items():
        for ranks, members in alike:
            if lacking := [r for r in ranks if r not in members]:
                return (
                    f"process group {name!r} over ranks {list(ranks)} exists on rank {min(members)} but not on ranks {lacking}: "
                    "a replacement must make the same groups in the same order before its block"
                )
    return None


def _different_replicas(votes: Sequence[Vote]) -> str | None:
    told: dict[str, tuple[int, ...]] = {}
    for vote in votes:
        for name, replicas in vote.shards.items():
            first = told.setdefault(name, replicas)
            if first is not replicas and first != replicas:
                return f"shard group {name!r} is on ranks {list(first)} for one rank and on {list(replicas)} for rank {vote.rank}"
    return None


def _census(votes: Sequence[Vote]) -> str:
    return ", ".join(f"rank {v.rank} {v.status.value} at block {v.block} step {v.step}" for v in votes)
