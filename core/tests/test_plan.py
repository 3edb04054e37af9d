"""``plan`` over every vote that three and four ranks can cast, and over every way a commit can be cut."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest

from instep.model import Address, Group, Plan, Role, Status, Unrecoverable, Vote
from instep.plan import plan

S = 7
Ballot = tuple[Status, int]
BALLOTS: tuple[Ballot, ...] = tuple(itertools.product(Status, (S, S + 1)))


@functools.cache
def vote(rank: int, status: Status, step: int, *, world: int, block: int = 0, split: int = 0) -> Vote:
    """One vote. ``split`` halves the world into two shard groups of a second piece of state."""
    half = tuple(r for r in range(world) if (r < split) == (rank < split))
    ranks = tuple(range(world))
    return Vote(
        rank=rank,
        birth=0,
        incarnation=3,
        block=block,
        step=step,
        status=status,
        groups=(Group(name="0", ranks=ranks, backend="gloo"),),
        address=Address(rank=rank, birth=0, host="127.0.0.1"),
        shards={"model": ranks} | ({f"optimizer{half[0]}": half} if split else {}),
        notes={"p": {"rank": rank}},
    )


def cast(ballots: Sequence[Ballot], *, split: int = 0) -> list[Vote]:
    return [vote(rank, status, step, world=len(ballots), split=split) for rank, (status, step) in enumerate(ballots)]


def held_step(ballot: Ballot) -> int | None:
    """The oracle, written from the protocol: what a rank's memory holds completely when it votes."""
    status, step = ballot
    if status in (Status.TORN, Status.FRESH):
        return None
    return step + 1 if status is Status.APPLIED else step


def check_against_the_protocol(ballots: Sequence[Ballot], outcome: Plan | Unrecoverable) -> None:
    steps = [step for ballot in ballots if (step := held_step(ballot)) is not None]
    if not steps:
        assert isinstance(outcome, Unrecoverable)
        assert "no rank holds a complete step" in outcome.why
        return
    assert isinstance(outcome, Plan)
    assert outcome.step == max(steps)
    for ballot, role in zip(ballots, outcome.roles, strict=True):
        if held_step(ballot) == outcome.step:
            assert role is Role.KEEP
        elif ballot == (Status.PREPARED, outcome.step - 1):
            assert role is Role.ROLL_FORWARD
        else:
            assert role is Role.RESTORE
    able = tuple(rank for rank, role in enumerate(outcome.roles) if role is not Role.RESTORE)
    assert outcome.donors == {"model": able if Role.RESTORE in outcome.roles else ()}
    assert [a.rank for a in outcome.book.addresses] == list(range(len(ballots)))
    assert [n["p"] for n in outcome.book.notes] == [{"rank": rank} for rank in range(len(ballots))]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_ballot_gives_the_plan_of_the_protocol(world: int) -> None:
    for ballots in itertools.product(BALLOTS, repeat=world):
        check_against_the_protocol(ballots, plan(cast(ballots)))


def test_the_order_of_votes_does_not_matter() -> None:
    for ballots in itertools.product(BALLOTS, repeat=3):
        votes = cast(ballots, split=1)
        assert len({plan(order).model_dump_json() for order in itertools.permutations(votes)}) == 1


def cuts(world: int) -> Iterator[tuple[Ballot, ...]]:
    """Every way in which a fault can cut commit S on its way to S + 1, seen by the survivors' votes; victims come back fresh.

    Before all have entered the barrier nobody passes it; after that a rank is waiting, in the body, past it, or a step ahead.
    """
    entering = ((Status.CLEAN, S), (Status.PREPARED, S), (Status.FRESH, 0))
    passed = ((Status.PREPARED, S), (Status.TORN, S), (Status.APPLIED, S), (Status.CLEAN, S + 1), (Status.FRESH, 0))
    yield from itertools.product(entering, repeat=world)
    yield from itertools.product(passed, repeat=world)


@pytest.mark.parametrize("world", [3, 4])
def test_a_cut_commit_goes_forward_or_back_on_all_ranks_together(world: int) -> None:
    for ballots in cuts(world):
        outcome = plan(cast(ballots))
        statuses = {status for status, _ in ballots}
        if statuses <= {Status.TORN, Status.FRESH}:
            assert isinstance(outcome, Unrecoverable)
            continue
        assert isinstance(outcome, Plan)
        someone_is_past = (Status.CLEAN, S + 1) in ballots or Status.APPLIED in statuses
        assert outcome.step == (S + 1 if someone_is_past else S)


@pytest.mark.parametrize("world", [3, 4])
def test_a_step_that_all_committed_is_never_lost(world: int) -> None:
    """However many ranks die then, as long as one lives."""
    later = ((Status.CLEAN, S + 1), (Status.PREPARED, S + 1), (Status.TORN, S + 1), (Status.FRESH, 0))
    for ballots in itertools.product(later, repeat=world):
        outcome = plan(cast(ballots))
        if isinstance(outcome, Plan):
            assert outcome.step >= S + 1
        else:
            assert {status for status, _ in ballots} <= {Status.TORN, Status.FRESH}


def test_donors_hold_the_target_and_never_restore() -> None:
    for ballots in itertools.product(BALLOTS, repeat=4):
        outcome = plan(cast(ballots, split=2))
        if isinstance(outcome, Unrecoverable):
            continue
        for name, donors in outcome.donors.items():
            members = range(4) if name == "model" else range(int(name[-1]), int(name[-1]) + 2)
            assert list(donors) == sorted(donors)
            assert set(donors) <= set(members)
            assert all(outcome.roles[donor] is not Role.RESTORE for donor in donors)
            restoring = [rank for rank in members if outcome.roles[rank] is Role.RESTORE]
            assert bool(donors) == bool(restoring)


def test_state_that_nobody_holds_is_named_with_its_ranks() -> None:
    outcome = plan(cast([(Status.FRESH, 0), (Status.TORN, S), (Status.CLEAN, S), (Status.CLEAN, S)], split=2))
    assert isinstance(outcome, Unrecoverable)
    assert "'optimizer0'" in outcome.why
    assert "[0, 1]" in outcome.why
    assert "rank 1 torn" in outcome.why


def test_ranks_in_different_blocks_are_named() -> None:
    outcome = plan([vote(0, Status.CLEAN, S, world=2, block=1), vote(1, Status.CLEAN, S, world=2)])
    assert isinstance(outcome, Unrecoverable)
    assert "ranks [1] are not in block 1" in outcome.why


def test_a_group_that_one_rank_did_not_make_is_named() -> None:
    votes = cast([(Status.CLEAN, S)] * 3)
    extra = Group(name="5", ranks=(0, 2), backend="gloo")
    votes[0] = votes[0].model_copy(update={"groups": (*votes[0].groups, extra)})
    outcome = plan(votes)
    assert isinstance(outcome, Unrecoverable)
    assert "process group '5'" in outcome.why
    assert "not on ranks [2]" in outcome.why
