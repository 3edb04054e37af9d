"""Set-up: ``session.once``, private objects, and what a replacement does otherwise than its predecessor."""

from pathlib import Path

import pytest
from session_world import PROLOGUE, fault, play, same

from instep.agent.spawner import Server

TRAIN = """
@session.recoverable
def train():
    while session.step < 6:
        step()

"""
ONCE = """
def draw():
    note("draw")
    return {"id": int.from_bytes(os.urandom(4), "little"), "of": rank}

first = session.once(draw)
second = session.once(lambda: [rank, "b"])
(OUT / f"first-{rank}-{os.getpid()}").write_text(json.dumps(first))
""" + TRAIN + """
train()
third = session.once(lambda: "third")
save(second=second, third=third, firsts=[json.loads(p.read_text()) for p in OUT.glob(f"first-{rank}-*")])
"""


def test_once_runs_once_for_each_rank_and_job(tmp_path: Path, sessions: Server) -> None:
    told = play(ONCE, tmp_path, sessions, fault("kill", 1, "collective", 2), fault("kill", 1, "collective", 4, birth=1))
    assert told.outcome.code == 0, told.all_said[-3000:]
    assert [saved["second"] for saved in told.saved] == [[0, "b"], [1, "b"], [2, "b"]]
    firsts = told.saved[1]["firsts"]
    assert isinstance(firsts, list)
    assert len(firsts) == 3
    assert all(first == firsts[0] for first in firsts)
    assert [notes for notes in told.notes] == [["draw"]] * 3


@pytest.mark.parametrize("value", ["(1, 2)", "torch.ones(1)", "float('inf')", "{1: 2}"])
def test_once_refuses_what_a_replacement_would_get_otherwise(value: str, tmp_path: Path, sessions: Server) -> None:
    told = play(f"session.once(lambda: {value})", tmp_path, sessions, ranks=2)
    assert told.outcome.code == 1
    assert "session.once() returned" in told.printed


PRIVATE = (
    """
class Meter:
    def __init__(self):
        self.rows = []
    def state_dict(self):
        return {"rows": self.rows}
    def load_state_dict(self, state):
        self.rows = [*state["rows"]]

meter = Meter()
generator = torch.Generator().manual_seed(rank)
session.protect(private={"meter": meter, "generator": generator})

@session.recoverable
def train():
    while session.step < 6:
        meter.rows.append([rank, session.step, torch.rand(1, generator=generator).item(), torch.rand(1).item()])
        step()

train()
save(rows=meter.rows, weights=weights.tolist())
"""
)


def test_private_objects_and_generators_go_back_on_every_rank(tmp_path: Path, sessions: Server) -> None:
    clean = play(PRIVATE, tmp_path / "clean", sessions)
    faults = [fault("kill", 1, "collective", 1), fault("raise", 2, "prepared", 2), fault("kill", 0, "barrier", 3), fault("kill", 2, "body", 4)]
    broken = play(PRIVATE, tmp_path / "broken", sessions, *faults)
    same([clean, broken])
    assert len(broken.outcome.fired) == 4


@pytest.mark.parametrize(
    ("object_", "says"),
    [
        ("nn.Linear(1, 1)", "changes in commits"),
        ("object()", "has no state_dict"),
    ],
)
def test_private_objects_that_cannot_be(object_: str, says: str, tmp_path: Path, sessions: Server) -> None:
    told = play(f"session.protect(private={{'it': {object_}}})", tmp_path, sessions, ranks=2)
    assert told.outcome.code == 1
    assert says in told.printed


SOURCE = """
got = torch.zeros(1)
if rank == 0:
    sender = dist.recv(got)
    dist.send(torch.tensor([7.0]), sender)
elif rank == 2:
    dist.send(torch.tensor([3.0]), 0)
    sender = dist.recv(got, 0)
else:
    sender = None
ring = torch.zeros(1)
for request in dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, torch.tensor([rank + 1.0]), (rank + 1) % 3), dist.P2POp(dist.irecv, ring, (rank - 1) % 3)]
):
    request.wait()
seen = [got.item(), sender, ring.item()]
""" + TRAIN + """
train()
save(seen=seen, weights=weights.tolist())
"""


def test_messages_of_set_up_are_replayed(tmp_path: Path, sessions: Server) -> None:
    clean = play(SOURCE, tmp_path / "clean", sessions)
    broken = play(SOURCE, tmp_path / "broken", sessions, fault("kill", 0, "collective", 1), fault("kill", 2, "collective", 3))
    same([clean, broken])
    assert [saved["seen"] for saved in clean.saved] == [[3, 2, 3], [0, None, 1], [7, 0, 2]]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("if born: dist.all_reduce(torch.ones(2))", "did not make: call 1, allreduce on '0'"),
        ("if not born: dist.all_reduce(torch.ones(2))", "did not make a set-up collective that its predecessor made: call 1, allreduce on '0'"),
        ("dist.all_reduce(torch.ones(3 if born else 2))", "set-up collective 1 of the replacement is allreduce"),
        ("dist.new_group([0, 1] if born else [0, 1, 2])", "must make the same groups"),
    ],
    ids=["more", "fewer", "other", "groups"],
)
def test_a_replacement_that_sets_up_otherwise_is_told(extra: str, says: str, tmp_path: Path, sessions: Server) -> None:
    body = f"born = int(os.environ['INSTEP_BIRTH'])\ndist.all_reduce(torch.ones(1))\n{extra}\n{TRAIN}train()"
    told = play(body, tmp_path, sessions, fault("kill", 1, "collective", 2))
    assert told.outcome.code != 0
    assert says in told.all_said
    assert len(told.outcome.incidents) == 1


def test_the_prologue_is_one_script() -> None:
    assert PROLOGUE.count("instep.init()") == 1
