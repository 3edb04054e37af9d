"""A commit that an adapter splits: gradients reduced in its body, a barrier, a local update of this rank's shard, all shards handed out.

Four ranks hold two shards, each on two ranks; whole weights are derived from the shards. The optimizer shares its scale between ranks
before the barrier, as scalers do, and skips a step when it is told to.
"""

from pathlib import Path

import pytest
from session_world import fault, play, same

from instep.agent.spawner import Server
from instep.messages import Injection

JOB = """
from instep.torch.adapter import name, tree

class Shard:
    def __init__(self, adapter):
        self.adapter, self.replicas = adapter, (rank % 2, rank % 2 + 2)
        self.name = name("half", self.replicas)
    def tree(self):
        return tree(tensors={"half": self.adapter.half}, objects={"seen": self.adapter.seen})
    def fit(self, theirs):
        return self.tree()
    def load(self, tree):
        self.adapter.seen = tree["objects"]["seen"]

class Scale:
    value = 1.0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

class Halves:
    def __init__(self):
        self.half, self.whole, self.seen, self.scale = torch.zeros(3), torch.zeros(6), [], Scale()
        self.resets = 0
    def attach(self, port, *, rank, world_size):
        self.port = port
    def groups(self):
        return [Shard(self)]
    def modules(self):
        return {}
    def private(self):
        return {"scale": self.scale}
    def publish(self):
        dist.all_gather_into_tensor(self.whole, self.half, group=pair)
    def reset(self):
        self.resets += 1
    def step(self, gradient):
        dist.all_reduce(gradient)
        norm = gradient.norm()
        dist.all_reduce(norm)
        self.scale.value += float(norm)  # changes before the barrier
        if skip(session.step):
            with self.port.update():
                pass
            return False
        with self.port.update():
            self.half.add_(gradient[:3] if rank % 2 == 0 else gradient[3:])
            self.seen = [*self.seen, session.step]
        self.port.publish(self.publish)
        return True

def skip(step):
    return step == 1

pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
pair = pairs[rank // 2]
halves = Halves()
counts = {"steps": 0}
session.protect(training=halves, counts=counts)

def hook():
    pass

def loop():
    while session.step < 6:
        hook()
        gradient = torch.full((6,), float(rank + 1) * (session.step + 1)) + torch.rand(6) + halves.whole
        with session.commit():
            halves.step(gradient)
            counts["steps"] += 1

def go():
    session.recoverable(loop)()
    save(half=halves.half.tolist(), whole=halves.whole.tolist(), seen=halves.seen, scale=halves.scale.value, counts=counts,
         rng=torch.rand(1).item(), resets=0 if session.incidents == 0 else min(halves.resets, 0))
"""
STEPS = {3: "update", 1: "skipped"}
POINTS = [
    *(f"{when}#{n}" for n in (1, 2, 3) for when in ("issue", "collective", "complete")),
    "record", "prepared", "barrier", "body", "applied", "after", "step",
]  # fmt: skip


@pytest.fixture(scope="module")
def clean(sessions: Server, tmp_path_factory: pytest.TempPathFactory) -> object:
    return play(JOB + "go()", tmp_path_factory.mktemp("split") / "clean", sessions, ranks=4)


def survives(clean: object, out: Path, sessions: Server, *faults: Injection, script: str = "go()") -> None:
    broken = play(JOB + script, out, sessions, *faults, ranks=4)
    same([clean, broken])  # type: ignore[list-item]
    assert broken.outcome.incidents
    assert all(i.scope == "in_process" and i.steps_lost == 0 and i.verified for i in broken.outcome.incidents)


@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_a_rank_is_lost_at_every_place_of_its_step(clean: object, kind: str, tmp_path: Path, sessions: Server) -> None:
    """One fault a job and step would take minutes: the job is long enough for one at each of its steps."""
    long = JOB.replace("session.step < 6", "session.step < 40").replace("step == 1", "step % 5 == 1") + "go()"
    whole = play(long, tmp_path / "clean", sessions, ranks=4)
    faults = [fault(kind, n % 4, point, 2 * n + 2, birth=None) for n, point in enumerate(POINTS)]
    broken = play(long, tmp_path / "broken", sessions, *faults, ranks=4)
    same([whole, broken])
    assert set(broken.outcome.fired) == {f.id for f in faults if (f.step or 0) % 5 != 1 or f.point in POINTS[:6] + POINTS[9:]}
    assert all(i.scope == "in_process" and i.steps_lost == 0 for i in broken.outcome.incidents)


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
def test_a_rank_cut_in_the_barrier_rolls_forward_and_all_publish(clean: object, step: int, tmp_path: Path, sessions: Server) -> None:
    """Ranks 0 and 2 have updated, rank 1 was cut in the barrier, and its twin 3 dies: half 1 exists at the older step only."""
    cut = f"""
import instep.commit
real = instep.commit.barrier

def barrier(engine, *, done):
    passed = real(engine, done=done)
    if rank == 1 and engine.step == {step} and session.incarnation == 0:
        while not engine.board.revoked:
            time.sleep(0.01)
        return False
    return passed

instep.commit.barrier = barrier
go()
"""
    survives(clean, tmp_path / "run", sessions, fault("kill", 3, "body", step), script=cut)


def test_a_rank_cut_while_it_publishes_has_lost_nothing(clean: object, tmp_path: Path, sessions: Server) -> None:
    survives(clean, tmp_path / "run", sessions, fault("kill", 1, "issue#3", 3), fault("kill", 2, "connect", birth=0))


def test_twins_at_once_are_no_way_to_go_on_in_process(tmp_path: Path, sessions: Server) -> None:
    told = play(JOB + "go()", tmp_path / "run", sessions, fault("kill", 1, "issue#1", 3), fault("kill", 3, "issue#1", 3), ranks=4)
    assert told.outcome.code == 70
    assert "shard group 'half@1' of rank 1 has no replica left among ranks [1, 3]" in told.all_said


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def loop():\n    with session.commit(): pass\n", "the commit of step 0 is empty"),
        ("def loop():\n    halves.step(torch.zeros(6))\n", "outside of a commit"),
        ("def loop():\n    with session.commit(): halves.step(torch.zeros(6)); halves.step(torch.zeros(6))\n", "inside a commit body"),
        (("def skip(_): return True\ndef loop():\n    with session.commit():\n        halves.step(torch.zeros(6))\n"
         "        halves.port.update().__enter__()\n"), "twice in a commit"),
    ],
)  # fmt: skip
def test_a_commit_without_its_step_and_a_step_without_its_commit(body: str, expected: str, tmp_path: Path, sessions: Server) -> None:
    told = play(JOB + body + "go()", tmp_path / "run", sessions, ranks=4)
    assert told.outcome.code != 0
    assert expected in told.all_said
