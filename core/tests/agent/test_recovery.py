"""The agent with real processes that speak its protocol: deaths, hangs, exceptions, and what is left in logs and reports."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.agent import events as ev
from instep.agent.agent import Launch, Server, serving
from instep.messages import Joined
from instep.model import IncidentReport

from .jobs import FAKE, launch, play


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(launch(FAKE)) as process:
        yield process


def test_a_run_without_faults(server: Server) -> None:
    story = play(launch(FAKE, "20"), server)
    assert story.outcome.code == 0
    assert story.outcome.incidents == []
    assert story.outcome.steps == 20


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("kill@1@5", "exit", "rank 1 was killed by signal 9 (SIGKILL)"),
        ("kill@0@5", "exit", "rank 0 was killed by signal 9 (SIGKILL)"),
        ("exit3@2@5", "exit", "rank 2 exited with code 3"),
        ("raise@0@5", "exception", "boom"),
        ("hang@2@5", "hang", "has been stopped"),
        ("sleep@1@5", "hang", "no movement"),
    ],
)
def test_one_fault_is_one_incident_and_the_job_ends_well(server: Server, fault: str, kind: str, words: str) -> None:
    story = play(launch(FAKE, "60", fault), server)
    assert story.outcome.code == 0, story.outcome.message
    (incident,) = story.outcome.incidents
    assert incident.fault.kind == kind
    assert words in incident.fault.detail
    assert incident.scope == "in_process"
    assert incident.seconds_to_resume is not None
    assert incident.seconds_to_resume < 2.0


def test_a_replacement_is_in_step_well_under_a_second_after_the_death(server: Server) -> None:
    story = play(launch(FAKE, "60", "kill@1@5"), server)
    (death,) = [at for at, what in story.events if isinstance(what, ev.Died) and what.code == -9]
    back = [at for at, what in story.events if isinstance(what, ev.Received) and isinstance(what.message, Joined) and at > death]
    assert back[2] - death < 0.8


def test_faults_of_two_ranks_at_once_and_one_after_the_other(server: Server) -> None:
    story = play(launch(FAKE, "80", "kill@1@5", "kill@2@5", "kill@0@40", nproc=4), server)
    assert story.outcome.code == 0, story.outcome.message
    assert {r for i in story.outcome.incidents for a in i.attempts for r in a.fault.ranks} == {0, 1, 2}


def test_plain_interpreters_serve_as_well() -> None:
    story = play(launch(FAKE, "150", "kill@1@5", preload=False))
    assert story.outcome.code == 0, story.outcome.message
    assert len(story.outcome.incidents) == 1


def test_the_stacks_of_a_hung_rank_are_in_its_log(server: Server, tmp_path: Path) -> None:
    play(launch(FAKE, "60", "sleep@1@5", log_dir=str(tmp_path)), server)
    text = (tmp_path / "rank-1.log").read_text()
    assert "in misbehave" in text
    assert text.count("welcome") == 2, "both births write to one log"
    assert "in misbehave" not in (tmp_path / "rank-0.log").read_text()


def test_reports_are_one_line_an_incident(server: Server, tmp_path: Path) -> None:
    story = play(launch(FAKE, "80", "kill@1@5", "raise@0@50", report_dir=str(tmp_path / "new" / "reports")), server)
    lines = (tmp_path / "new" / "reports" / "incidents.jsonl").read_text().splitlines()
    assert [IncidentReport.model_validate(json.loads(line)) for line in lines] == story.outcome.incidents


def test_a_death_in_set_up_restarts_the_whole_job(server: Server, tmp_path: Path) -> None:
    story = play(launch(FAKE, "30", "kill@0@20", env={"DIE_IN_SETUP": "1@0"}, log_dir=str(tmp_path)), server)
    assert story.outcome.code == 0, story.outcome.message
    first, second = story.outcome.incidents
    assert (first.scope, first.fault.ranks, second.scope, second.fault.ranks) == ("job", (1,), "in_process", (0,))
    assert first.seconds_to_step is not None
    assert (tmp_path / "rank-1.log").read_text().count("welcome 0 book=True") == 1


def test_all_ranks_waiting_ends_with_the_table(server: Server) -> None:
    story = play(launch(FAKE, "60", "wait@0@5", "wait@1@5", "wait@2@5"), server)
    assert story.outcome.code == 70
    assert "rank 2  world all_reduce" in story.outcome.message


def test_a_fault_that_comes_back_trips_the_breaker(server: Server) -> None:
    story = play(launch(FAKE, "60", "RAISE@0@5", nproc=1), server)
    assert story.outcome.code == 70
    assert "3 times on rank 0 at step 5: boom" in story.outcome.message


def test_a_death_outside_of_a_block_ends_with_the_scripts_code(server: Server) -> None:
    story = play(launch(FAKE, "60", "outside@1@5"), server)
    assert story.outcome.code == 5


def test_a_fork_server_that_does_not_answer_is_replaced_by_a_plain_interpreter(server: Server) -> None:
    job = launch(FAKE, "300", "kill@1@5", settings={"deadlines.spawn": 0.5})
    stopped: list[int] = []

    def act(what: object) -> None:
        if isinstance(what, ev.Died) and what.code in {-9, None} and not stopped:
            stopped.append(server.process.pid)
            os.kill(server.process.pid, signal.SIGSTOP)
        if isinstance(what, ev.Born) and what.birth == 1:
            os.kill(server.process.pid, signal.SIGCONT)

    story = play(job, server, act)
    assert stopped
    assert story.outcome.code == 0, story.outcome.message
    (incident,) = story.outcome.incidents
    assert 0.5 < (incident.seconds_to_resume or 0.0) < 5.0


def test_a_death_is_noticed_while_the_fork_server_is_stopped(server: Server) -> None:
    def act(what: object) -> None:
        if isinstance(what, ev.Received) and isinstance(what.message, Joined) and what.rank == 2 and what.message.incarnation == 0:
            os.kill(server.process.pid, signal.SIGSTOP)
        if isinstance(what, ev.Spawn) and what.birth == 1:
            os.kill(server.process.pid, signal.SIGCONT)

    story = play(launch(FAKE, "300", "kill@1@5"), server, act)
    assert story.outcome.code == 0, story.outcome.message
    assert story.outcome.incidents[0].fault.detail == "rank 1 was killed by signal 9 (SIGKILL)", (
        "its status is read although nobody reaped it"
    )


def test_the_death_of_the_fork_server_gives_up_after_a_committed_step_and_restarts_otherwise() -> None:
    pids: list[int] = []

    def kill(job: Launch, at: float, **fields: object) -> tuple[int, str, list[IncidentReport]]:
        with serving(job) as own:
            begun: list[float] = []

            def act(what: object) -> None:
                if isinstance(what, ev.Received) and isinstance(what.message, Joined) and what.rank == 0:
                    begun.append(time.monotonic())
                    if len(begun) == 1:
                        time.sleep(at)
                        own.process.kill()

            story = play(job, own, act)
            pids.append(own.process.pid)
            return story.outcome.code, story.outcome.message, story.outcome.incidents

    code, message, _ = kill(launch(FAKE, "100"), 0.3)
    assert code == 70
    assert "the fork server ended by signal 9 (SIGKILL)" in message
    code, message, incidents = kill(launch(FAKE, "40", max_restarts=1), 0.3)
    assert code == 0, message
    assert [i.scope for i in incidents] == ["job"]
