"""What goes wrong in and around a commit: cut barriers, bodies that raise, calls that may not stand in a body."""

import json
from pathlib import Path

import pytest
from session_world import fault, play, same

from instep.agent.spawner import Server

LOOP = """
def hook():
    pass

def body():
    pass

def loop():
    while session.step < 6:
        hook()
        gradient = torch.full((4,), float(rank + 1) * (session.step + 1)) + torch.rand(4)
        dist.all_reduce(gradient)
        with session.commit():
            body()
            weights.add_(gradient)

def first_time(name):
    path = OUT / f"{name}-{rank}"
    if path.exists():
        return False
    path.touch()
    return True

def go():
    session.recoverable(loop)()
    save(weights=weights.tolist(), rng=torch.rand(1).item())
"""
CLEAN = LOOP + "go()"
CUT = """
import instep.commit
real = instep.commit.barrier

def barrier(engine, *, done):
    passed = real(engine, done=done)
    if rank == 0 and engine.step == 2 and first_time("cut"):
        while not engine.board.revoked:  # as if gloo had not told this rank that all are there
            time.sleep(0.01)
        return False
    return passed

instep.commit.barrier = barrier
"""


@pytest.fixture(scope="module")
def clean(sessions: Server, tmp_path_factory: pytest.TempPathFactory) -> object:
    return play(CLEAN, tmp_path_factory.mktemp("commit") / "clean", sessions)


def test_a_rank_that_was_cut_in_the_barrier_rolls_forward(clean: object, tmp_path: Path, sessions: Server) -> None:
    script = LOOP + CUT + "def body():\n    note(f'{session.step}')\ngo()"
    broken = play(script, tmp_path / "run", sessions, fault("raise", 1, "after", 2))
    same([clean, broken])  # type: ignore[list-item]
    assert broken.notes[0] == ["0", "1", "2", "3", "4", "5"]
    assert broken.outcome.incidents[0].step == 3


def test_a_body_that_raises_while_it_rolls_forward(clean: object, tmp_path: Path, sessions: Server) -> None:
    body = "def body():\n    if rank == 0 and session.step == 2 and first_time('body'): raise ValueError('in the body')\n"
    script = LOOP + CUT + body + "go()"
    broken = play(script, tmp_path / "run", sessions, fault("raise", 1, "after", 2))
    same([clean, broken])  # type: ignore[list-item]
    (incident,) = broken.outcome.incidents
    assert incident.attempts[0].failed_phase == "reinit_comms"
    assert incident.step == 3


@pytest.mark.parametrize("who", ["rank == 0", "rank != 2"])
def test_a_body_that_raises_is_restored_from_those_that_passed(clean: object, who: str, tmp_path: Path, sessions: Server) -> None:
    script = LOOP + f"def body():\n    if {who} and session.step == 3 and first_time('body'): raise ValueError('in the body')\ngo()"
    broken = play(script, tmp_path / "run", sessions)
    same([clean, broken])  # type: ignore[list-item]
    assert broken.outcome.incidents[0].step == 4
    assert broken.outcome.incidents[0].fault.kind == "exception"


def test_a_body_that_raises_everywhere_leaves_nobody_to_restore_from(tmp_path: Path, sessions: Server) -> None:
    script = LOOP + "def body():\n    if session.step == 3: raise ValueError('in the body')\ngo()"
    broken = play(script, tmp_path / "run", sessions)
    assert broken.outcome.code == 70
    assert "no rank holds a complete step" in broken.outcome.message


def test_an_interruption_never_lands_in_a_body_or_in_what_a_commit_does_behind_it(clean: object, tmp_path: Path, sessions: Server) -> None:
    """Rank 1 dies while rank 0 is in its body, then in the first look at optimizer state after it, then in a plugin's place."""
    script = (
        LOOP
        + """
class Slow:
    flagged = False
    def state_dict(self):
        if self.flagged:
            self.flagged = False
            time.sleep(1.5)
            note("looked")
        return {"a": 1}
    def load_state_dict(self, state):
        pass

slow = Slow()
session.protect(slow=slow)

def body():
    if rank == 0 and session.step == 0 and first_time("body"):
        time.sleep(1.5)
        note("body")
        slow.flagged = True

go()
"""
    )
    drill = {"drill.directory": str(tmp_path)}
    seeded = play(CLEAN, tmp_path / "clean", sessions, settings=drill)
    digests = [(tmp_path / f"rank-{r}.steps.jsonl").read_text() for r in range(3)]
    for r in range(3):
        (tmp_path / f"rank-{r}.steps.jsonl").unlink()
    broken = play(script, tmp_path / "run", sessions, fault("kill", 1, "body", 0), settings=drill)
    same([seeded, broken])
    assert broken.notes[0] == ["body", "looked"]
    after = [(tmp_path / f"rank-{r}.steps.jsonl").read_text() for r in range(3)]
    assert [json.loads(line)["step"] for line in after[0].splitlines()] == [0, 1, 2, 3, 4, 5]
    assert after[0] == digests[0]


def test_a_commit_that_is_wrapped_in_except_exception(clean: object, tmp_path: Path, sessions: Server) -> None:
    script = (
        LOOP
        + """
def tolerant():
    while session.step < 6:
        try:
            loop()
        except Exception as error:
            note(type(error).__name__)

def go():
    session.recoverable(tolerant)()
    save(weights=weights.tolist(), rng=torch.rand(1).item())

go()
"""
    )
    broken = play(script, tmp_path / "run", sessions, fault("kill", 1, "collective", 2), fault("kill", 2, "body", 4))
    same([clean, broken])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("dist.new_group([0, 1])", "process group '1' inside a commit body"),
        ("next(iter(loader))", "loader"),
        ("session.once(lambda: 1)", "session.once()"),
    ],
    ids=["new-group", "loader", "once"],
)
def test_calls_that_may_not_stand_in_a_body(body: str, says: str, tmp_path: Path, sessions: Server) -> None:
    script = LOOP + f"loader = torch.utils.data.DataLoader(list(range(8)))\nsession.protect(loader=loader)\ndef body():\n    {body}\ngo()"
    broken = play(script, tmp_path / "run", sessions)
    assert broken.outcome.code == 1
    assert says in broken.outcome.message
    assert "inside a" in broken.outcome.message


def test_steps_go_on_from_the_one_that_init_was_given(tmp_path: Path, sessions: Server) -> None:
    script = LOOP + "go()"
    prologue = __import__("session_world").PROLOGUE.replace("instep.init()", "instep.init(step=3)")
    one = play(script, tmp_path / "clean", sessions, prologue=prologue)
    two = play(script, tmp_path / "run", sessions, fault("kill", 1, "collective", 3), fault("kill", 0, "prepared", 4), prologue=prologue)
    same([one, two])
    assert two.outcome.steps == 6
    assert [i.step for i in two.outcome.incidents] == [3, 4]
