"""The watchdog's rules, tick by tick: who is judged, when, and who never."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from instep.agent import events as ev
from instep.agent.records import Progress, State
from instep.agent.watchdog import Sight, Timing, Vitals, Watchdog

from .desk import NOTHING

TIMING = Timing(tick=0.1, stall=1.0, moving=20.0, startup=6.0, acknowledge=2.0)


@dataclass
class Rank:
    """One simulated rank: ``works`` changes it at every tick."""

    progress: Progress = field(default_factory=lambda: replace(NOTHING, state=State.STEP, step=5, joined=0))
    vitals: Vitals = field(default_factory=Vitals)
    greeted: bool = True
    joined: bool = True
    owes: bool = False
    voted: bool = False
    birth: int = 0
    works: Callable[["Rank"], None] = lambda rank: None

    def set(self, **words: object) -> None:
        self.progress = replace(self.progress, **words)  # type: ignore[arg-type]


def trains(rank: Rank) -> None:
    rank.set(step=rank.progress.step + 1)


def computes(rank: Rank) -> None:
    rank.vitals = replace(rank.vitals, cpu=rank.vitals.cpu + 1)


def collects(rank: Rank) -> None:
    rank.set(collectives=rank.progress.collectives + 1)


def reads(rank: Rank) -> None:
    rank.vitals = replace(rank.vitals, io=rank.vitals.io + 4096)


def beats(rank: Rank) -> None:
    rank.set(beat=rank.progress.beat + 1)


def watch(ranks: list[Rank], seconds: float, watchdog: Watchdog | None = None, absent: int = 0) -> tuple[float, list[ev.Hung | ev.Stuck]]:
    """Tick until the first verdict; when it came, and what it was."""
    watchdog = watchdog or Watchdog(TIMING)
    ticks = round(seconds / TIMING.tick)
    for tick in range(ticks):
        for rank in ranks:
            rank.works(rank)
        sights = [Sight(i, r.birth, r.progress, r.vitals, r.greeted, r.joined, r.owes, r.voted) for i, r in enumerate(ranks)]
        if verdicts := watchdog.tick(sights, absent=absent):
            return tick * TIMING.tick, verdicts
    return seconds, []


def waiting() -> Rank:
    rank = Rank()
    rank.set(waiting=1, operation="world all_reduce", sequence=9)
    return rank


def stepped(*ranks: Rank) -> Watchdog:
    """A watchdog that has seen these ranks commit, so that the grace of a first step is over."""
    watchdog = Watchdog(TIMING)
    before = [r.works for r in ranks]
    for rank in ranks:
        rank.works = trains
    watch(list(ranks), 0.3, watchdog)
    for rank, works in zip(ranks, before, strict=True):
        rank.works = works
    return watchdog


def test_a_still_rank_is_hung_after_the_stall_and_its_waiting_peers_are_not() -> None:
    ranks = [waiting(), Rank(), waiting()]
    at, verdicts = watch(ranks, 10.0, stepped(*ranks))
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [1]
    assert at == pytest.approx(1.0, abs=0.25)
    assert isinstance(verdicts[0], ev.Hung)
    assert verdicts[0].dump


@pytest.mark.parametrize("sign", [trains, computes, collects, reads])
def test_any_movement_is_life(sign: Callable[[Rank], None]) -> None:
    ranks = [waiting(), Rank(works=sign), waiting()]
    assert watch(ranks, 10.0, stepped(*ranks))[1] == []


def test_the_control_threads_beat_is_no_movement_of_main() -> None:
    ranks = [waiting(), Rank(works=beats)]
    assert [v.rank for v in watch(ranks, 10.0, stepped(*ranks))[1] if isinstance(v, ev.Hung)] == [1]


def test_the_first_step_after_a_join_has_three_times_the_stall() -> None:
    at, verdicts = watch([waiting(), Rank()], 10.0)
    assert len(verdicts) == 1
    assert at == pytest.approx(3.0, abs=0.25)


def test_slow_steps_raise_the_stall_to_ten_medians() -> None:
    def slow(rank: Rank, ticks: list[int]) -> None:
        ticks[0] += 1
        if ticks[0] % 5 == 0:
            trains(rank)

    counts = [[0], [0]]
    ranks = [Rank(works=lambda r, c=c: slow(r, c)) for c in counts]  # type: ignore[misc]
    watchdog = Watchdog(TIMING)
    assert watch(ranks, 8.0, watchdog)[1] == []
    ranks[0].works = ranks[1].works = lambda rank: None
    ranks[0].set(waiting=1)
    at, verdicts = watch(ranks, 20.0, watchdog)
    assert len(verdicts) == 1
    assert at == pytest.approx(5.0, abs=0.6)


def test_a_rank_that_holds_the_newest_step_alone_is_spared_until_the_long_deadline() -> None:
    ranks = [waiting(), Rank()]
    watchdog = stepped(*ranks)
    ranks[1].set(step=ranks[0].progress.step + 1)
    at, verdicts = watch(ranks, 60.0, watchdog)
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [1]
    assert at == pytest.approx(20.0, abs=0.3)


def test_a_replacement_that_has_not_joined_covers_nobody() -> None:
    ranks = [Rank(joined=False, works=computes), Rank()]
    ranks[0].set(state=State.SETUP, step=99)
    assert watch(ranks, 10.0, stepped(ranks[1]))[1] == []


def test_ranks_do_not_cover_each_other_when_both_are_judged() -> None:
    ranks = [Rank(), Rank()]
    watchdog = stepped(*ranks)
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert len(verdicts) == 1
    assert at == pytest.approx(1.0, abs=0.25)
    assert watch(ranks, 10.0, watchdog)[1] == [], "the last holder of a step is spared until the long deadline"


@pytest.mark.parametrize("voted", [True, False])
def test_in_a_recovery_only_the_phases_own_deadlines_count(*, voted: bool) -> None:
    ranks = [Rank(voted=voted), Rank(joined=False, works=computes)]
    watchdog = stepped(*ranks)
    ranks[0].set(state=State.RECOVERY, operation="plan")
    ranks[1].set(state=State.SETUP)
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert (at, len(verdicts)) == ((10.0, 0) if voted else (pytest.approx(6.0, abs=0.3), 1))


def test_a_rank_stopped_in_a_recovery_is_hung() -> None:
    ranks = [Rank(), Rank(voted=True)]
    watchdog = stepped(*ranks)
    for rank in ranks:
        rank.set(state=State.RECOVERY)
    ranks[1].vitals = Vitals(stopped=True)
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert at == pytest.approx(1.0, abs=0.25)
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [1]


def test_moving_without_a_commit_has_the_long_deadline() -> None:
    ranks = [waiting(), Rank(works=computes)]
    at, verdicts = watch(ranks, 60.0, stepped(*ranks))
    assert at == pytest.approx(20.0, abs=0.3)
    assert isinstance(verdicts[0], ev.Hung)
    assert "has not committed" in verdicts[0].why


@pytest.mark.parametrize("state", [State.BORN, State.SETUP])
def test_set_up_has_its_own_grace(state: State) -> None:
    ranks = [Rank(joined=False), Rank(joined=False, works=computes)]
    for rank in ranks:
        rank.set(state=state)
    at, verdicts = watch(ranks, 60.0)
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [0]
    assert at == pytest.approx(6.0, abs=0.3)


def test_outside_of_blocks_a_script_may_rest() -> None:
    ranks = [Rank(), Rank(works=computes)]
    watchdog = stepped(*ranks)
    ranks[0].set(state=State.OUTSIDE)
    at, _ = watch(ranks, 60.0, watchdog)
    assert at == pytest.approx(6.0, abs=0.3)


def test_a_stopped_process_is_hung_even_if_it_says_that_it_waits() -> None:
    ranks = [waiting(), waiting(), waiting()]
    watchdog = stepped(*ranks)
    ranks[1].vitals = Vitals(stopped=True)
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert at == pytest.approx(1.0, abs=0.25)
    assert [(v.rank, v.dump) for v in verdicts if isinstance(v, ev.Hung)] == [(1, False)]


def test_ranks_that_are_all_stopped_cover_nobody_until_one_goes_on() -> None:
    ranks = [waiting() for _ in range(3)]
    watchdog = stepped(*ranks)
    for rank in ranks:
        rank.vitals = Vitals(stopped=True)
    assert watch(ranks, 15.0, watchdog) == (15.0, [])
    ranks[1].vitals = Vitals()
    _, verdicts = watch(ranks, 1.0, watchdog)
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [0, 2]


def test_a_replacement_stopped_in_set_up_is_judged_without_the_long_grace() -> None:
    ranks = [waiting(), Rank(joined=False, birth=1, vitals=Vitals(stopped=True))]
    ranks[1].set(state=State.SETUP)
    at, verdicts = watch(ranks, 10.0)
    assert len(verdicts) == 1
    assert at == pytest.approx(3.0, abs=0.3)


def test_all_waiting_without_movement_is_a_deadlock_with_a_table() -> None:
    ranks = [waiting(), waiting()]
    ranks[1].set(operation="tp barrier", sequence=4)
    at, verdicts = watch(ranks, 10.0, stepped(*ranks))
    assert at == pytest.approx(1.0, abs=0.25)
    assert isinstance(verdicts[0], ev.Stuck)
    assert "rank 0  world all_reduce  number 9" in verdicts[0].table
    assert "rank 1  tp barrier        number 4" in verdicts[0].table


def test_waiting_for_a_rank_that_has_just_died_is_no_deadlock() -> None:
    ranks = [waiting(), Rank(), waiting()]
    watchdog = stepped(*ranks)
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert [v.rank for v in verdicts if isinstance(v, ev.Hung)] == [1]
    survivors = [ranks[0], ranks[2]]
    assert watch(survivors, 10.0, Watchdog(TIMING), absent=1)[1] == []
    assert isinstance(watch(survivors, 10.0, Watchdog(TIMING))[1][0], ev.Stuck)
    assert at == pytest.approx(1.0, abs=0.25)


def test_all_waiting_with_one_moving_or_recovering_is_no_deadlock() -> None:
    ranks = [waiting(), waiting()]
    watchdog = stepped(*ranks)
    ranks[1].works = computes
    assert watch(ranks, 10.0, watchdog)[1] == []
    ranks = [waiting(), waiting()]
    watchdog = stepped(*ranks)
    ranks[0].set(state=State.RECOVERY)
    assert watch(ranks, 10.0, watchdog)[1] == []


def test_a_vote_that_is_owed_has_a_deadline_even_for_a_rank_that_moves() -> None:
    ranks = [waiting(), Rank(works=computes)]
    watchdog = stepped(*ranks)
    ranks[1].owes = True
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert at == pytest.approx(2.0, abs=0.25)
    assert isinstance(verdicts[0], ev.Hung)
    assert "did not acknowledge" in verdicts[0].why


def test_a_birth_is_judged_once_and_the_next_one_starts_anew() -> None:
    ranks = [waiting(), Rank()]
    watchdog = stepped(*ranks)
    assert len(watch(ranks, 10.0, watchdog)[1]) == 1
    assert watch(ranks, 10.0, watchdog)[1] == []
    ranks[1].birth = 1
    at, verdicts = watch(ranks, 10.0, watchdog)
    assert len(verdicts) == 1
    assert at == pytest.approx(3.0, abs=0.25)


def test_only_ticks_count() -> None:
    """A watchdog that is not asked for a while, because its agent was stopped, judges nobody for that while."""
    ranks = [waiting(), Rank()]
    watchdog = stepped(*ranks)
    assert watch(ranks, 0.8, watchdog)[1] == []
    ranks[1].works = trains
    assert watch(ranks, 1.0, watchdog)[1] == []
