"""``plan`` with copies: every moment of a commit at which a rank can die, as the protocol of copies brings them about.

A model of four ranks walks through all interleavings of a few steps: a rank stands at a step, its copy of it is made and acknowledged
by its buddy, it enters the barrier, passes it, is in the body, stands at the next step. In each moment each rank is killed, and in each
recovery from that another one.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from instep.agent.records import SLOTS
from instep.model import Address, Plan, Role, Status, Unrecoverable, Vote
from instep.plan import plan

WORLD, STEPS = 4, 2
ALL = tuple(range(WORLD))
SHARED = "replica"


def unique(rank: int) -> str:
    return f"shards@{rank}"


def buddy(rank: int) -> int:
    return (rank + 1) % WORLD


@dataclass(frozen=True)
class Rank:
    """Where a rank is: ``place`` is work, barrier or body of the step it stands at; ``kept``: 0 nothing, 1 own copy, 2 acknowledged."""

    step: int = 0
    place: str = "work"
    kept: int = 0

    @property
    def own(self) -> frozenset[int]:
        """Steps of its own copies."""
        return frozenset(s for s in (self.step - 1, self.step if self.kept else -1) if s >= 0)

    @property
    def told(self) -> frozenset[int]:
        """Steps of the copies that its buddy has."""
        return frozenset(s for s in (self.step - 1, self.step if self.kept == 2 else -1) if s >= 0)

    @property
    def records(self) -> frozenset[int]:
        """Steps of private state in its record: the newest is written before the barrier."""
        newest = self.step + (self.place != "work")
        return frozenset(range(max(0, newest - SLOTS + 1), newest + 1))


State = tuple[Rank, ...]


def moves(state: State) -> Iterator[State]:
    """What may happen next."""
    for r, rank in enumerate(state):
        if rank.kept < 2:
            yield put(state, r, replace(rank, kept=rank.kept + 1))
        elif rank.place == "work" and rank.step < STEPS:
            yield put(state, r, replace(rank, place="barrier"))
        if rank.place == "barrier" and all((o.step, o.place != "work") >= (rank.step, True) for o in state):
            yield put(state, r, replace(rank, place="body"))
        if rank.place == "body":
            yield put(state, r, Rank(step=rank.step + 1))


def put(state: State, at: int, rank: Rank) -> State:
    return (*state[:at], rank, *state[at + 1 :])


def reachable() -> list[State]:
    """All moments after the first copies were made: before that nothing was committed, and the job may start again."""
    first = (Rank(kept=2),) * WORLD
    seen, fresh = {first}, [first]
    while fresh:
        for after in moves(fresh.pop()):
            if after not in seen:
                seen.add(after)
                fresh.append(after)
    return sorted(seen, key=repr)


@dataclass(frozen=True)
class Quiet:
    """A rank that votes: its status, and the copies in it, its own and those of the rank whose buddy it is."""

    status: Status
    step: int
    own: frozenset[int]
    others: frozenset[int]


def quiet(state: State, victim: int, *, body: Mapping[int, Status]) -> list[Quiet]:
    """All ranks, when ``victim`` was killed; ranks in the body end as ``body`` tells: clean at the next step, or torn by an error."""
    out = []
    for r, rank in enumerate(state):
        others = state[(r - 1) % WORLD].told
        if r == victim:
            out.append(Quiet(Status.FRESH, 0, frozenset(), frozenset()))
        elif rank.place == "body":
            out.append(Quiet(body[r], rank.step + (body[r] is Status.CLEAN), rank.own, others))
        else:
            status = Status.PREPARED if rank.place == "barrier" else Status.CLEAN
            out.append(Quiet(status, rank.step, rank.own, others))
    return out


def cast(ranks: Sequence[Quiet]) -> list[Vote]:
    votes = []
    for r, rank in enumerate(ranks):
        copies = {SHARED: rank.own, unique(r): rank.own, unique((r - 1) % WORLD): rank.others}
        votes.append(
            Vote(
                rank=r, birth=0, incarnation=1, block=0, step=rank.step, status=rank.status, groups=(),
                address=Address(rank=r, birth=0, host="127.0.0.1"), shards={SHARED: ALL, unique(r): (r,)},
                copies={name: tuple(sorted(steps)) for name, steps in copies.items() if steps},
            )
        )  # fmt: skip
    return votes


def check(ranks: Sequence[Quiet], outcome: Plan) -> None:
    """Every rank can do what the plan says, from what is really there."""
    for r, (rank, role) in enumerate(zip(ranks, outcome.roles, strict=True)):
        held = rank.step if rank.status in (Status.CLEAN, Status.PREPARED) else None
        if role is Role.KEEP:
            assert held == outcome.step
        elif role is Role.ROLL_FORWARD:
            assert (rank.status, rank.step + 1) == (Status.PREPARED, outcome.step)
        else:
            for name in (SHARED, unique(r)):
                donors = outcome.donors[name]
                assert donors
                assert (r in donors) == (outcome.step in rank.own), "whoever has its own copy takes it, and nobody else"
    for name, donors in outcome.donors.items():
        assert list(donors) == sorted(donors)
        for donor in donors:
            if name in outcome.copied or outcome.roles[donor] is Role.RESTORE:
                mine = name in (SHARED, unique(donor))
                assert outcome.step in (ranks[donor].own if mine else ranks[donor].others)
    restoring = {r for r, role in enumerate(outcome.roles) if role is Role.RESTORE}
    for name, members in {SHARED: ALL, **{unique(r): (r,) for r in ALL}}.items():
        assert bool(outcome.donors[name]) == bool(restoring & set(members))
        assert (name in outcome.copied) == (restoring >= set(members))


def first_faults(every: int = 1) -> Iterator[tuple[State, int, list[Quiet]]]:
    for state in reachable()[::every]:
        inside = [r for r, rank in enumerate(state) if rank.place == "body"]
        for victim in ALL:
            for ends in itertools.product((Status.CLEAN, Status.TORN), repeat=len(inside)):
                yield state, victim, quiet(state, victim, body=dict(zip(inside, ends, strict=True)))


def test_a_rank_that_dies_at_any_moment_costs_at_most_one_step() -> None:
    back = kept = 0
    for state, victim, ranks in first_faults():
        outcome = plan(cast(ranks))
        assert isinstance(outcome, Plan), (state, victim, outcome)
        check(ranks, outcome)
        committed = min(rank.step for rank in state)
        assert committed - 1 <= outcome.step
        assert all(outcome.step in rank.records for rank in state), "the private state of that step is still recorded"
        newest = max([r.step for r in ranks if r.status in (Status.CLEAN, Status.PREPARED)] + [s for r in ranks for s in r.others])
        dead = ranks[buddy(victim)].others
        torn = any(r.status is Status.TORN for r in ranks)
        if newest in dead and not torn:
            assert outcome.step == newest, "with a complete copy nobody goes back"
            kept += 1
        elif newest not in dead:
            assert outcome.step < newest
            back += 1
    assert back > 50
    assert kept > 50


def second_faults(ranks: Sequence[Quiet], first: Plan, victim: int, second: int) -> Iterator[list[Quiet]]:
    """Every way in which a recovery can be cut: each rank has not begun, is half restored, or is in step and has copied again."""
    done = [_in_step(r, first.step) for r in ranks]
    for reached in itertools.product(("before", "amid", "in step"), repeat=WORLD):
        out = []
        for r, how in enumerate(reached):
            rank, role = ranks[r], first.roles[r]
            forward = replace(rank, status=Status.CLEAN, step=first.step) if role is Role.ROLL_FORWARD else rank
            if r == second:
                out.append(Quiet(Status.FRESH, 0, frozenset(), frozenset()))
            elif how == "in step":
                # The replacement has copies of its own only once it has joined, and of others when they have sent again.
                out.append(replace(done[r], own=done[r].own | ({first.step} if r == victim else frozenset())))
            elif how == "amid" and role is Role.RESTORE:
                out.append(replace(rank, status=Status.FRESH if r == victim else Status.TORN))
            else:
                out.append(forward)
        yield out


def _in_step(rank: Quiet, step: int) -> Quiet:
    return Quiet(Status.CLEAN, step, frozenset(s for s in rank.own if s <= step), frozenset(s for s in rank.others if s <= step))


def test_a_second_death_in_the_recovery_is_survived_unless_it_takes_the_only_copy() -> None:
    """What died with a buddy's memory is gone until the copies were sent again; everything else is found."""
    survived = lost = 0
    for state, victim, ranks in first_faults(every=97):
        first = plan(cast(ranks))
        assert isinstance(first, Plan)
        for second in [r for r in ALL if r != victim]:
            for cut in second_faults(ranks, first, victim, second):
                outcome = plan(cast(cut))
                if isinstance(outcome, Unrecoverable):
                    assert second in (buddy(victim), (victim - 1) % WORLD), (state, victim, second, cut, outcome)
                    assert any(repr(unique(r)) in outcome.why for r in (victim, second))
                    lost += 1
                    continue
                check(cut, outcome)
                assert first.step - 1 <= outcome.step <= first.step + 1
                assert all(outcome.step in rank.records or outcome.step == first.step for rank in state)
                survived += 1
    assert survived > 1000
    assert lost > 1000


def test_owner_and_buddy_at_once_are_named() -> None:
    for state in reachable():
        ranks = quiet(state, 0, body=dict.fromkeys(ALL, Status.CLEAN))
        ranks[1] = ranks[0]
        outcome = plan(cast(ranks))
        assert isinstance(outcome, Unrecoverable)
        assert "'shards@0' of rank 0 has no replica left among ranks [0], and nobody keeps a copy" in outcome.why


@pytest.mark.parametrize("live", [True, False])
def test_a_replica_that_lives_is_preferred_to_a_copy(live: bool) -> None:
    ranks = [Quiet(Status.CLEAN if live else Status.TORN, 7, frozenset({7}), frozenset({7}))] * 3
    ranks.append(Quiet(Status.FRESH, 0, frozenset(), frozenset()))
    outcome = plan(cast(ranks))
    assert isinstance(outcome, Plan)
    others = {unique(r): () if live else (r,) for r in (0, 1, 2)}
    assert outcome.donors == {SHARED: (0, 1, 2), **others, unique(3): (0,)}
    assert outcome.copied == ((unique(3),) if live else (SHARED, *others, unique(3)))


def test_the_order_of_votes_does_not_matter() -> None:
    for _, _, ranks in itertools.islice(first_faults(), 0, None, 97):
        assert len({plan(order).model_dump_json() for order in itertools.permutations(cast(ranks))}) == 1
