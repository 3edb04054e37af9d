"""Blocks of a session: values, several in a row, and what ends a job."""

from pathlib import Path

import pytest
from session_world import Told, fault, play, same

from instep.agent.spawner import Server
from instep.block import as_json

TWO = """
@session.recoverable
def first():
    while session.step < 4:
        step()
    return {"at": session.step, "list": [1, 2.5, None]}

@session.recoverable
def second(value, *, more):
    while session.step < 8:
        step()
    return value["at"] + more

one = first()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
gathered = [torch.zeros(1) for _ in range(3)]
dist.all_gather(gathered, torch.tensor([rank + 0.5]))
two = second(one, more=10)
save(one=one, two=two, weights=weights.tolist(), total=total.item(), rng=torch.rand(1).item(), gathered=[g.item() for g in gathered])
"""


@pytest.fixture(scope="module")
def clean(sessions: Server, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return play(TWO, tmp_path_factory.mktemp("blocks") / "clean", sessions)


def test_a_replacement_passes_finished_blocks_and_gets_their_values(clean: Told, tmp_path: Path, sessions: Server) -> None:
    faults = [fault("kill", 2, "collective", 1), fault("kill", 1, "collective", 6), fault("kill", 1, "record", 7, birth=1)]
    broken = play(TWO, tmp_path / "broken", sessions, *faults)
    same([clean, broken])
    assert clean.saved[0]["two"] == 14
    assert clean.saved[1]["gathered"] == [0.5, 1.5, 2.5]
    assert [i.scope for i in broken.outcome.incidents] == ["in_process"] * 3


def test_faults_when_some_ranks_have_finished_the_block(clean: Told, tmp_path: Path, sessions: Server) -> None:
    """A rank that is done stays a donor, and runs the block's end again."""
    faults = [fault("raise", 0, "done", 4), fault("kill", 1, "done", 4), fault("kill", 2, "done", 8), fault("raise", 0, "done", 8, birth=0)]
    faults[3] = faults[3].model_copy(update={"id": 77})
    broken = play(TWO, tmp_path / "broken", sessions, *faults)
    same([clean, broken])
    assert len(broken.outcome.fired) == 4


LATE = """
import instep.block as blocks
from instep.messages import Closed
tell = session._engine.tell
told = []

def late(message):
    # The first rank knows that all are done, the second dies before it knows.
    if isinstance(message, Closed) and rank == 1 and message.block == 0:
        point("knows")
    tell(message)
    if isinstance(message, Closed):
        told.append(message.incarnation)

session._engine.tell = late
"""


def test_a_death_between_the_two_phases_of_a_release(clean: Told, tmp_path: Path, sessions: Server) -> None:
    broken = play(LATE + TWO, tmp_path / "broken", sessions, fault("kill", 1, "knows", 4))
    same([clean, broken])
    assert len(broken.outcome.incidents) == 1


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, True),
        (None, True),
        (10**30, True),
        ((1, 2), False),
        ({1: 2}, False),
        (float("inf"), False),
        (float("nan"), False),
        (object(), False),
        (b"x", False),
    ],
)
def test_values_that_json_holds(value: object, kept: bool) -> None:
    plain, back = as_json(value)
    assert plain is kept
    assert not kept or back == value


def test_another_kind_of_value_followed_by_a_block(tmp_path: Path, sessions: Server) -> None:
    body = """
@session.recoverable
def first():
    step()
    return torch.ones(2)

@session.recoverable
def second():
    step()

note(str(first()))
second()
"""
    told = play(body, tmp_path, sessions, ranks=2)
    assert told.outcome.code == 1
    assert "first returned Tensor" in told.outcome.message
    assert ["tensor([1., 1.])"] in told.notes  # the other rank may have ended the job first


@pytest.mark.parametrize(("call", "code"), [("sys.exit(5)", 5), ("sys.exit('words')", 1), ("sys.exit()", 0)])
def test_an_exit_in_a_block_ends_the_job_with_its_code(call: str, code: int, tmp_path: Path, sessions: Server) -> None:
    body = f"""
@session.recoverable
def train():
    while True:
        if session.step == 2 and rank == 1:
            {call}
        step()

train()
"""
    told = play(body, tmp_path, sessions, ranks=2)
    assert told.outcome.code == code, told.all_said[-2000:]
    assert not told.outcome.incidents


def test_a_restart_of_the_whole_job_is_over_when_all_have_committed(tmp_path: Path, sessions: Server) -> None:
    body = """
@session.recoverable
def train():
    while session.step < 4:
        if session.step == 2 and not (OUT / f"failed-{rank}").exists():
            (OUT / f"failed-{rank}").touch()
            with session.commit():
                raise ValueError("everywhere")
        step()

train()
save(weights=weights.tolist())
"""
    told = play(body, tmp_path, sessions, ranks=2, max_restarts=1)
    assert told.outcome.code == 0, told.all_said[-3000:]
    (incident,) = told.outcome.incidents
    assert (incident.scope, incident.steps_lost) == ("job", 2)
    assert incident.seconds_to_step is not None
