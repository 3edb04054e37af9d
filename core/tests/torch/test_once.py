"""Set-up: ``session.once``, private objects, and what a replacement does otherwise than its predecessor."""

from pathlib import Path

import pytest
from session_world import fault, play, same

from instep.agent.spawner import Server

TRAIN = """
@session.recoverable
def train():
    while session.step < 6:
        step()

"""
ONCE = (
    """
def draw():
    note("draw")
    return {"id": int.from_bytes(os.urandom(4), "little"), "of": rank}

first = session.once(draw)
second = session.once(lambda: [rank, "b"])
(OUT / f"first-{rank}-{os.getpid()}").write_text(json.dumps(first))
"""
    + TRAIN
    + """
train()
third = session.once(lambda: "third")
save(second=second, third=third, firsts=[json.loads(p.read_text()) for p in OUT.glob(f"first-{rank}-*")])
"""
)


def test_once_runs_once_for_each_rank_and_job(tmp_path: Path, sessions: Server) -> None:
    told = play(ONCE, tmp_path, sessions, fault("kill", 1, "collective", 2), fault("kill", 1, "collective", 4, birth=1))
    assert told.outcome.code == 0, told.all_said[-3000:]
    assert [saved["second"] for saved in told.saved] == [[0, "b"], [1, "b"], [2, "b"]]
    firsts = told.saved[1]["firsts"]
    assert isinstance(firsts, list)
    assert len(firsts) == 3
    assert all(first == firsts[0] for first in firsts)
    assert told.notes == [["draw"]] * 3


REFUSED = """
def says(call):
    try:
        call()
    except instep.UsageError as error:
        return str(error)

values = [(1, 2), torch.ones(1), float("inf"), {1: 2}]
save(
    once=[says(lambda: session.once(lambda: value)) for value in values],
    module=says(lambda: session.protect(private={"it": nn.Linear(1, 1)})),
    object=says(lambda: session.protect(private={"it2": object()})),
)
session.recoverable(lambda: None)()
"""


def test_what_a_replacement_could_not_get_is_refused(tmp_path: Path, sessions: Server) -> None:
    told = play(REFUSED, tmp_path, sessions, ranks=2)
    assert told.outcome.code == 0, told.all_said[-2000:]
    once, module, other = (told.saved[0][key] for key in ("once", "module", "object"))
    assert isinstance(once, list)
    assert all("session.once() returned" in str(text) for text in once), once
    assert "changes in commits" in str(module)
    assert "has no state_dict" in str(other)


PRIVATE = """
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


def test_private_objects_and_generators_go_back_on_every_rank(tmp_path: Path, sessions: Server) -> None:
    clean = play(PRIVATE, tmp_path / "clean", sessions)
    faults = [fault("kill", 1, "collective", 1), fault("raise", 2, "prepared", 2), fault("kill", 0, "barrier", 3)]
    faults += [fault("kill", 2, "body", 4)]
    broken = play(PRIVATE, tmp_path / "broken", sessions, *faults)
    same([clean, broken])
    assert len(broken.outcome.fired) == 4


SOURCE = (
    """
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
"""
    + TRAIN
    + """
train()
save(seen=seen, weights=weights.tolist())
"""
)


def test_messages_of_set_up_are_replayed(tmp_path: Path, sessions: Server) -> None:
    clean = play(SOURCE, tmp_path / "clean", sessions)
    broken = play(SOURCE, tmp_path / "broken", sessions, fault("kill", 0, "collective", 1), fault("kill", 2, "collective", 3))
    same([clean, broken])
    assert [saved["seen"] for saved in clean.saved] == [[3, 2, 3], [0, None, 1], [7, 0, 2]]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("if born: dist.all_reduce(torch.ones(2))", "did not make: call 1, allreduce on '0'"),
        ("if not born: dist.all_reduce(torch.ones(2))", "did not make a set-up collective that its predecessor made: call 1, allreduce"),
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
