"""What becomes of a job that loses some ranks: core's own plan on the votes that they would cast, and what it would move.

A lost rank's replacement votes fresh, all others are clean. Buddy copies are taken to be as old as they may be, one step.
"""

from collections.abc import Iterator, Sequence

from instep.layouts import Layout
from instep.model import Address, Plan, Role, Status, Value, Vote
from instep.plan import plan

_STEP = 1


class Transfer(Value):
    """One shard group: the ranks that send it together, those that each receive all of it, and the bytes of one copy."""

    group: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    bytes: int


class Forecast(Value):
    """A loss. ``seconds`` is the time that the busiest link needs, ``None`` when no bandwidth is known or nothing can be sent."""

    lose: tuple[int, ...]
    survivable: bool
    why: str = ""
    steps_lost: int = 0
    transfers: tuple[Transfer, ...] = ()
    bytes: int = 0
    seconds: float | None = None


class Buddies(Value):
    """What buddy copies cost a rank at most: bytes sent in each step, and host memory for the copies of two steps."""

    distance: int
    bytes_per_step: int
    memory: int


def votes(layout: Layout, lose: Sequence[int]) -> list[Vote]:
    """The votes after these ranks were lost and replaced."""
    out = []
    for rank in range(layout.ranks):
        lost = rank in lose
        out.append(
            Vote(
                rank=rank,
                birth=int(lost),
                incarnation=1,
                block=0,
                step=0 if lost else _STEP,
                status=Status.FRESH if lost else Status.CLEAN,
                groups=(),
                address=Address(rank=rank, birth=int(lost), host="-"),
                shards={group.name: group.replicas for group in layout.of(rank)},
                copies={} if lost else dict.fromkeys(_copies(layout, rank), (_STEP - 1,)),
            )
        )
    return out


def judge(layout: Layout, lose: Sequence[int], *, bandwidth: float | None = None) -> Forecast:
    """What becomes of the job when these ranks are lost at once. ``bandwidth``: bytes a second of each rank, in and out at once."""
    lost = tuple(sorted(set(lose)))
    made = plan(votes(layout, lost))
    if not isinstance(made, Plan):
        return Forecast(lose=lost, survivable=False, why=made.why.partition(" (rank ")[0])
    moves = tuple(_transfers(layout, made))
    busiest = max((max(_in(moves, rank), _out(moves, rank)) for rank in range(layout.ranks)), default=0.0)
    return Forecast(
        lose=lost,
        survivable=True,
        steps_lost=_STEP - made.step,
        transfers=moves,
        bytes=sum(move.bytes * len(move.receivers) for move in moves),
        seconds=None if bandwidth is None else busiest / bandwidth,
    )


def singles(layout: Layout) -> list[Forecast]:
    """The loss of each rank alone."""
    return [judge(layout, (rank,)) for rank in range(layout.ranks)]


def fatal(layout: Layout) -> list[Forecast]:
    """The smallest losses that cannot be survived among those that leave a shard group without a replica, and without its copies."""
    found: dict[tuple[int, ...], Forecast] = {}
    for group in layout.groups:
        lost = set(group.replicas)
        if layout.buddies and len(lost) == 1:
            lost |= {(rank + layout.distance) % layout.ranks for rank in lost}
        forecast = judge(layout, sorted(lost))
        if not forecast.survivable:
            found[forecast.lose] = forecast
    least = min((len(lost) for lost in found), default=0)
    return [forecast for lost, forecast in sorted(found.items()) if len(lost) == least]


def cost(layout: Layout) -> Buddies | None:
    """What buddy copies cost the rank on which they cost most; ``None`` without."""
    if not layout.buddies:
        return None
    alone = [sum(g.bytes for g in layout.of(rank) if len(g.replicas) == 1) for rank in range(layout.ranks)]
    own = [sum(g.bytes for g in layout.of(rank)) for rank in range(layout.ranks)]
    memory = max(2 * (own[rank] + alone[rank - layout.distance]) for rank in range(layout.ranks))
    return Buddies(distance=layout.distance, bytes_per_step=max(alone), memory=memory)


def _copies(layout: Layout, rank: int) -> Iterator[str]:
    if layout.buddies and layout.distance:
        yield from (group.name for group in layout.of(rank))
        yield from (group.name for group in layout.of((rank - layout.distance) % layout.ranks) if len(group.replicas) == 1)


def _transfers(layout: Layout, made: Plan) -> Iterator[Transfer]:
    for group in layout.groups:
        senders = made.donors.get(group.name, ())
        receivers = tuple(rank for rank in group.replicas if made.roles[rank] is Role.RESTORE and rank not in senders)
        if receivers and senders:
            yield Transfer(group=group.name, senders=senders, receivers=receivers, bytes=group.bytes)


def _in(moves: Sequence[Transfer], rank: int) -> float:
    return sum(move.bytes for move in moves if rank in move.receivers)


def _out(moves: Sequence[Transfer], rank: int) -> float:
    return sum(move.bytes * len(move.receivers) / len(move.senders) for move in moves if rank in move.senders)
