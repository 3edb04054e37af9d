"""The coordinator's rules, one by one, without a process."""

import pytest

from instep.agent import events as ev
from instep.agent.records import State
from instep.messages import Closing, Fatal, Fired, Gather, Gathered, Injection, Interrupt, Once, Planned, Release, Welcome
from instep.model import Fault, Status

from .desk import Desk

# ---- the start


def test_start_spawns_every_rank_and_waits_for_all_hellos() -> None:
    desk = Desk()
    assert desk.of(ev.Spawn) == [ev.Spawn(rank, 0, 0) for rank in range(3)]
    assert desk.hello(0).out == []
    assert desk.hello(2).out == []
    welcomes = desk.hello(1).sent(Welcome)
    assert sorted(welcomes) == [0, 1, 2]
    assert all(w.incarnation == 0 and w.book is not None and len(w.book.addresses) == 3 for w in welcomes.values())


def test_a_second_hello_of_a_birth_is_ignored() -> None:
    desk = Desk().greeted()
    assert desk.hello(1).out == []


def test_gather_is_answered_in_the_order_of_the_members_when_the_last_has_asked() -> None:
    desk = Desk().live()
    for rank in (2, 0):
        desk.say(rank, Gather(incarnation=0, key="tp", members=(2, 0), rank=rank, notes={"next": rank}))
    answers = desk.sent(Gathered)
    assert sorted(answers) == [0, 2]
    assert answers[0].notes == ({"next": 2}, {"next": 0})


def test_a_gather_that_a_fault_cut_is_forgotten() -> None:
    desk = Desk().live()
    desk.say(0, Gather(incarnation=0, key="tp", members=(0, 1), rank=0, notes={}))
    desk.fault(2)
    desk.say(1, Gather(incarnation=0, key="tp", members=(0, 1), rank=1, notes={}))
    assert desk.sent(Gathered) == {}
    desk.say(1, Gather(incarnation=1, key="tp", members=(0, 1), rank=1, notes={}))
    assert desk.sent(Gathered) == {}


# ---- deaths in set-up


def test_a_signal_in_setup_restarts_the_whole_job_three_times_at_most() -> None:
    desk = Desk()
    for start in range(3):
        desk.greeted()
        assert desk.dies(1).of(ev.Restart), start
        assert desk.dies(2).out == [], "while the job is being cleared, further deaths mean nothing"
        assert desk.handle(ev.Cleared()).of(ev.Spawn) == [ev.Spawn(rank, 0, start + 1) for rank in range(3)]
    desk.greeted()
    finish = desk.dies(0).finish()
    assert finish.code == 70
    assert "without committing a step" in finish.message


def test_an_exit_code_in_setup_ends_the_job_with_that_code_and_names_the_rank() -> None:
    finish = Desk().greeted().dies(2, 3).finish()
    assert (finish.code, finish.rank) == (3, 2)
    assert "rank 2 exited with code 3 in set-up" in finish.message


def test_a_script_without_instep_ends_with_its_own_code() -> None:
    assert Desk().dies(0, 7).finish().code == 7
    assert Desk().dies(0, -15).finish().code == 143
    desk = Desk()
    for rank in range(3):
        desk.dies(rank, 0)
    assert desk.finish().code == 0


def test_a_script_without_instep_restarts_within_max_restarts_and_is_reported_when_all_run_again() -> None:
    desk = Desk(max_restarts=1)
    desk.now = 105.0
    assert desk.dies(1).of(ev.Restart)
    desk.handle(ev.Cleared())
    desk.now = 105.5
    for rank in range(3):
        desk.handle(ev.Born(rank, 0))
    (report,) = desk.of(ev.Report)
    assert report.incident.scope == "job"
    assert report.incident.seconds_to_resume == pytest.approx(0.5)
    assert desk.dies(1).finish().code == 137


@pytest.mark.parametrize("hello_first", [True, False])
def test_a_rank_that_ends_without_hello_while_others_wait_is_named(*, hello_first: bool) -> None:
    desk = Desk()
    if hello_first:
        desk.hello(0).dies(1, 0)
    else:
        desk.dies(1, 0).hello(0)
    finish = desk.finish()
    assert finish.code == 1
    assert "rank 1 ended without calling instep.init()" in finish.message


def test_a_rank_that_ends_without_a_block_while_others_are_in_it_is_named() -> None:
    desk = Desk().greeted()
    desk.joined(0).dies(1, 0)
    assert "rank 1 ended without entering the block" in desk.finish().message


def test_an_exception_before_all_have_joined_waits_for_the_rest() -> None:
    desk = Desk().greeted().joined(0)
    assert desk.fault(0).out == []
    desk.joined(1)
    assert desk.joined(2).sent(Interrupt)[1].incarnation == 1


# ---- one fault in a block


def test_a_death_interrupts_the_survivors_and_replaces_the_dead() -> None:
    desk = Desk().live(step=7)
    desk.dies(1)
    assert sorted(desk.sent(Interrupt)) == [0, 2]
    assert desk.of(ev.Spawn) == [ev.Spawn(1, 1, 0)]
    welcome = desk.hello(1).sent(Welcome)[1]
    assert (welcome.book, welcome.incarnation) == (None, 1)
    assert desk.sent(Interrupt)[1].incarnation == 1
    desk.vote(0, 7).vote(2, 7)
    plans = desk.vote(1, 0, Status.FRESH).sent(Planned)
    assert sorted(plans) == [0, 1, 2]
    assert plans[0].plan.step == 7
    desk.now += 0.2
    for rank in range(3):
        desk.joined(rank, 7)
    desk.now += 0.1
    (report,) = desk.stepped(8).of(ev.Report)
    incident = report.incident
    assert (incident.scope, incident.step, incident.steps_lost, incident.fault.kind) == ("in_process", 7, 0, "exit")
    assert incident.fault.detail == "rank 1 was killed by signal 9 (SIGKILL)"
    assert incident.fault.signature == "1:exit:-9:7"
    assert incident.seconds_to_resume == pytest.approx(0.2)
    assert incident.seconds_to_step == pytest.approx(0.3)


def test_the_plan_is_made_once_and_only_from_votes_of_this_incarnation() -> None:
    desk = Desk().live(step=4)
    desk.fault(0)
    desk.vote(0, 4).vote(2, 4).vote(1, 4, incarnation=0)
    assert desk.plans == []
    desk.vote(1, 4)
    assert len(desk.plans) == 1
    assert desk.vote(2, 4).out == []
    assert len(desk.plans) == 1


def test_votes_commits_and_dones_of_a_failed_attempt_do_not_count() -> None:
    desk = Desk().live(step=4).fault(0)
    desk.vote(0, 4).vote(1, 4).dies(2).hello(2)
    assert desk.vote(2, 0, Status.FRESH).sent(Planned) == {}
    desk.vote(0, 4).vote(1, 4)
    assert len(desk.plans) == 1
    for rank in range(3):
        desk.joined(rank, 4)
    desk.committed(0, 5)
    desk.fault(1)
    for rank in range(3):
        desk.vote(rank, 5)
    for rank in range(3):
        desk.joined(rank, 5)
    for rank in range(3):
        desk.done(rank, 5)
    desk.closed(0).fault(1)
    for rank in range(3):
        desk.vote(rank, 5)
    for rank in range(3):
        desk.joined(rank, 5)
    desk.committed(1, 6)
    assert desk.committed(2, 6).of(ev.Report) == [], "rank 0 committed in an earlier attempt only"
    for rank in range(3):
        desk.done(rank, 6)
    desk.closed(1)
    assert desk.closed(2).sent(Release) == {}, "rank 0 acknowledged in an earlier attempt only"
    assert sorted(desk.closed(0).sent(Release)) == [0, 1, 2]


def test_a_replacement_gets_what_its_predecessors_left() -> None:
    injections = [
        Injection(id=i, rank=1, kind="kill", step=s, point="step", birth=b) for i, (s, b) in enumerate([(1, None), (2, None), (3, 0)])
    ]
    desk = Desk(injections=injections)
    desk.live()
    desk.say(1, Once(index=1, value="b")).say(1, Once(index=0, value="a"))
    desk.say(1, Fired(id=0, at=99.5))
    welcome = desk.dies(1).hello(1).sent(Welcome)[1]
    assert welcome.once == ("a", "b")
    assert [i.id for i in welcome.injections] == [1]


def test_seconds_count_from_the_injection() -> None:
    desk = Desk(injections=[Injection(id=5, rank=1, kind="kill", step=1, point="step")]).live(step=1)
    desk.say(1, Fired(id=5, at=desk.now))
    desk.now += 0.5
    desk.dies(1).replaced(1, 1)
    (report,) = desk.stepped(2).of(ev.Report)
    assert report.incident.seconds_to_resume == pytest.approx(0.5)


def test_a_communication_error_waits_for_the_death_behind_it() -> None:
    desk = Desk().live(step=3)
    assert desk.fault(0, "comms").of(ev.Wake) == [ev.Wake(0.05)]
    desk.now += 0.01
    desk.dies(2)
    desk.now += 0.05
    assert desk.handle(ev.Woken()).out == []
    assert desk.incarnation == 1


def test_a_communication_error_that_nothing_explains_opens_an_incident() -> None:
    desk = Desk().live(step=3)
    desk.fault(0, "comms:0")
    desk.now += 0.02
    assert desk.handle(ev.Woken()).of(ev.Wake)[0].seconds == pytest.approx(0.03)
    desk.now += 0.04
    assert sorted(desk.handle(ev.Woken()).sent(Interrupt)) == [0, 1, 2]


def test_a_rank_that_fails_because_of_a_known_fault_opens_nothing() -> None:
    desk = Desk().live(step=3).dies(2)
    assert desk.fault(0, "e").out == []
    assert desk.fault(1, "comms").out == []
    desk.vote(0, 3)
    assert desk.fault(0, phase="quiesce").sent(Interrupt), "a phase that failed is news"


def test_older_incarnations_are_dropped() -> None:
    desk = Desk().live(step=3)
    desk.fault(0)
    assert desk.fault(1, incarnation=0).out == []
    assert desk.joined(1, incarnation=0).out == []
    assert desk.done(1, 3, incarnation=0).out == []
    assert desk.incarnation == 1


def test_an_older_birth_is_dropped() -> None:
    desk = Desk().live(step=3).dies(1)
    assert desk.handle(ev.Died(1, 0, -9)).out == []
    assert desk.handle(ev.Hung(1, 0, "late", dump=True)).out == []


# ---- faults in a recovery


def test_a_second_fault_is_a_further_attempt_of_the_same_incident() -> None:
    desk = Desk().live(step=3).dies(1).hello(1)
    desk.vote(0, 3).vote(2, 3).vote(1, 0, Status.FRESH)
    desk.fault(0, phase="restore")
    assert sorted(desk.sent(Interrupt)) == [0, 1, 2]
    desk.at(2, State.RECOVERY).dies(2).hello(2)
    for rank in range(3):
        desk.vote(rank, 3 if rank == 0 else 0, Status.CLEAN if rank == 0 else Status.FRESH)
    for rank in range(3):
        desk.joined(rank, 3)
    (report,) = desk.stepped(4).of(ev.Report)
    attempts = report.incident.attempts
    assert [a.incarnation for a in attempts] == [1, 2, 3]
    assert [a.failed_phase for a in attempts] == ["restore", "recovery", None]
    assert report.incident.fault == attempts[0].fault
    assert desk.coordinator.job.incidents == 1


def test_a_step_that_all_had_committed_and_that_is_redone_counts_as_lost() -> None:
    desk = Desk().live(step=9)
    desk.dies(0).hello(0)
    desk.vote(1, 7).vote(2, 7).vote(0, 0, Status.FRESH)
    for rank in range(3):
        desk.joined(rank, 7)
    (report,) = desk.stepped(8).of(ev.Report)
    assert (report.incident.step, report.incident.steps_lost) == (7, 2)


def test_a_replacement_that_writes_step_zero_into_the_record_does_not_hide_what_was_committed() -> None:
    desk = Desk().live(step=9).dies(0).hello(0)
    desk.at(0, State.SETUP, 0).dies(0)
    assert desk.coordinator.job.floor() == 9


def test_no_plan_takes_the_job_rung_and_says_why_each_rung_failed() -> None:
    desk = Desk().live(step=3).fault(0)
    for rank in range(3):
        desk.vote(rank, 3, Status.TORN)
    finish = desk.finish()
    assert finish.code == 70
    for words in ("no rank holds a complete step", "checkpoint", "--max-restarts 0"):
        assert words in finish.message
    (report,) = desk.of(ev.Report)
    assert report.incident.seconds_to_resume is None


def test_the_job_rung_is_free_before_a_committed_step_and_costs_a_restart_after() -> None:
    desk = Desk().live(step=0).fault(0)
    for rank in range(3):
        desk.vote(rank, 0, Status.TORN)
    assert desk.of(ev.Restart)
    desk = Desk(max_restarts=1).live(step=3).fault(0)
    for rank in range(3):
        desk.vote(rank, 3, Status.TORN)
    assert desk.of(ev.Restart)
    desk.everyone(State.BORN, 0).handle(ev.Cleared())
    desk.greeted()
    for rank in range(3):
        desk.joined(rank)
    (report,) = desk.stepped(1).of(ev.Report)
    assert (report.incident.scope, report.incident.steps_lost) == ("job", 3)


# ---- between and after blocks


def test_a_block_is_released_in_two_phases() -> None:
    desk = Desk().live(step=5)
    assert desk.done(0, 5).done(1, 5).out == []
    assert sorted(desk.done(2, 5).sent(Closing)) == [0, 1, 2]
    assert desk.closed(0).closed(2).out == []
    assert sorted(desk.closed(1).sent(Release)) == [0, 1, 2]
    for rank in range(2):
        assert desk.at(rank, State.ENDED).dies(rank, 0).out == []
    assert desk.at(2, State.ENDED).dies(2, 0).finish() == ev.Finish(0)


def test_a_fault_before_release_starts_again_and_old_dones_do_not_count() -> None:
    desk = Desk().live(step=5)
    for rank in range(3):
        desk.done(rank, 5)
    desk.closed(0).dies(1).replaced(1, 5)
    assert desk.done(1, 5).sent(Closing) == {}
    desk.done(0, 5).done(2, 5)
    desk.closed(0).closed(1)
    (report,) = desk.closed(2).of(ev.Report)
    assert report.incident.seconds_to_step is None, "no step was left to commit"


def test_a_replacement_passes_blocks_that_were_released() -> None:
    desk = Desk().live(step=5)
    for rank in range(3):
        desk.done(rank, 5)
    for rank in range(3):
        desk.closed(rank)
    desk.everyone(State.STEP)
    for rank in range(3):
        desk.at(rank, State.STEP, block=1)
    welcome = desk.dies(2).hello(2).sent(Welcome)[2]
    assert [(d.block, d.value) for d in welcome.finished] == [(0, "result 2")]


@pytest.mark.parametrize("state", [State.OUTSIDE, State.SETUP])
def test_a_death_outside_a_block_takes_the_job_rung_and_says_so(state: State) -> None:
    finish = Desk().live(step=5).at(1, state).dies(1).finish()
    assert finish.code == 70
    assert "outside of a recoverable block" in finish.message


def test_a_death_after_release_that_was_not_noticed_yet_is_outside() -> None:
    desk = Desk().live(step=5)
    for rank in range(3):
        desk.done(rank, 5)
    for rank in range(3):
        desk.closed(rank)
    assert "outside" in desk.dies(0).finish().message


def test_the_scripts_own_failure_after_its_last_block_is_its_exit_code() -> None:
    assert Desk().live(step=5).at(1, State.OUTSIDE).dies(1, 4).finish().code == 4
    assert Desk().live(step=5).at(1, State.ENDED).dies(1, -11).finish().code == 139
    assert Desk(max_restarts=1).live(step=5).at(1, State.OUTSIDE).dies(1, 4).of(ev.Restart)


def test_a_death_in_a_block_when_another_rank_has_ended_cannot_be_recovered() -> None:
    desk = Desk().live(step=5).at(0, State.ENDED).dies(0, 0)
    assert "rank 0 had already ended" in desk.dies(1).finish().message


def test_a_fault_that_a_worker_reports_when_another_rank_has_ended_opens_nothing() -> None:
    """The rank that has ended would never vote, and the others would wait for it without an end."""
    desk = Desk().live(step=5).at(0, State.ENDED).dies(0, 0).fault(1)
    assert "rank 0 had already ended" in desk.finish().message
    assert not desk.sent(Interrupt)


def test_what_a_detector_finds_when_a_rank_has_ended_is_ignored() -> None:
    desk = Desk().live(step=5).at(0, State.ENDED).dies(0, 0)
    fault = Fault(kind="plugin", ranks=(), detail="a link is down", detected_by="links", at=desk.now)
    assert desk.handle(ev.Detected(fault)).out == []


def test_an_exit_with_code_zero_inside_a_block_is_a_death_like_any_other() -> None:
    assert Desk().live(step=5).dies(1, 0).of(ev.Spawn) == [ev.Spawn(1, 1, 0)]


# ---- hangs, the breaker, the end


def test_a_hang_is_a_kill_and_the_death_that_follows_says_why() -> None:
    desk = Desk().live(step=5)
    desk.handle(ev.Hung(2, 0, "no movement for 5 s", dump=True))
    assert desk.of(ev.Kill) == [ev.Kill(2, 0, "no movement for 5 s", dump=True)]
    fault = desk.dies(2).sent(Interrupt)[0].fault
    assert (fault.kind, fault.detail) == ("hang", "rank 2 hung: no movement for 5 s")


def test_all_ranks_waiting_is_a_fault_of_the_job_and_shows_the_table() -> None:
    finish = Desk().live(step=5).handle(ev.Stuck("  rank 0  world all_reduce  number 7")).finish()
    assert finish.code == 70
    assert "number 7" in finish.message


def test_the_breaker_trips_at_the_third_equal_fault_without_progress() -> None:
    desk = Desk().live(step=5)
    for _ in range(2):
        desk.fault(1, "1:ValueError:5")
        for rank in range(3):
            desk.vote(rank, 5)
        for rank in range(3):
            desk.joined(rank, 5)
    finish = desk.fault(1, "1:ValueError:5").finish()
    assert finish.code == 70
    for words in ("3 times", "rank 1", "step 5", "boom"):
        assert words in finish.message


def test_the_breaker_trips_when_recoveries_lead_nowhere() -> None:
    desk = Desk(recoveries=4).live(step=5)
    for i in range(4):
        assert desk.fault(1, f"different {i}", phase="connect").of(ev.Finish) == []
    assert "4 recoveries in a row" in desk.fault(1, "different 4", phase="connect").finish().message


def test_progress_resets_the_breaker() -> None:
    desk = Desk(recoveries=2).live(step=0)
    for step in range(1, 8):
        desk.dies(step % 3).replaced(step % 3, step).stepped(step + 1)
    assert desk.coordinator.job.incidents == 7
    assert not desk.coordinator.job.over


def test_fatal_ends_the_job_with_its_code_and_nothing_more_is_heard() -> None:
    desk = Desk().live(step=5).say(0, Fatal(message="uneven batches", code=1))
    assert (desk.finish().code, desk.finish().message) == (1, "uneven batches")
    assert desk.dies(1).out == []


def test_a_lost_fork_server_restarts_the_job_if_nothing_was_committed() -> None:
    assert Desk().live(step=0).handle(ev.ServerDied("gone")).of(ev.Restart)
    finish = Desk().live(step=2).handle(ev.ServerDied("the fork server ended")).finish()
    assert finish.code == 70
    assert "the fork server ended" in finish.message


def test_a_detected_fault_opens_an_incident() -> None:
    desk = Desk().live(step=2)
    fault = Fault(kind="plugin", ranks=(), detail="a link is down", detected_by="links", at=desk.now)
    assert sorted(desk.handle(ev.Detected(fault)).sent(Interrupt)) == [0, 1, 2]


def test_ranks_owe_a_vote_once_another_rank_has_voted() -> None:
    desk = Desk().live(step=2).fault(0)
    assert desk.coordinator.job.owing() == frozenset()
    desk.vote(0, 2)
    assert desk.coordinator.job.owing() == {1, 2}
    desk.vote(1, 2).vote(2, 2)
    assert desk.coordinator.job.owing() == frozenset()


def test_a_replacement_that_has_voted_owes_a_vote_in_each_later_incarnation() -> None:
    """Also when a newer fault overtook its message that it is in step, which is out of date then and dropped."""
    desk = Desk().live(step=2).dies(2)
    assert desk.hello(2).vote(0, 2).coordinator.job.owing() == {1}
    desk.vote(2, 0, Status.FRESH).vote(1, 2)
    assert desk.joined(0, 2).fault(0).vote(0, 2).coordinator.job.owing() == {1, 2}
    assert desk.joined(2, 2, incarnation=1).coordinator.job.owing() == {1, 2}


def test_a_late_word_of_a_block_that_all_have_left_is_out_of_date() -> None:
    desk = Desk().live(step=2)
    for rank in range(3):
        desk.done(rank, 2)
    for rank in range(3):
        desk.closed(rank)
    assert desk.coordinator.job.life.released == 0
    assert desk.done(1, 2).coordinator.job.members[1].done is None
