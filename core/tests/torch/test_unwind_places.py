"""Where an interruption reaches the main thread: wherever the script is, however it is written, but never where state would tear."""

from pathlib import Path

from session_world import PROLOGUE, fault, play

from instep.agent.spawner import Server

PLACES = (
    PROLOGUE.replace("session.protect(weights=weights)", "")
    + """
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index >= 32 and rank == 0 and first_time("dataset"):
            while True:
                time.sleep(0.01)
        return torch.tensor([float(index)])

class Exit:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        if error[0] is not None:
            raise KeyError("from __exit__")

def first_time(name):
    path = OUT / f"{name}-{rank}"
    if path.exists():
        return False
    path.touch()
    return True

def compute():
    while True:
        sum(range(1000))

def sleep():
    time.sleep(60)

def take():
    queue.Queue().get()

def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()

def swallow():
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            note("swallowed")

def in_finally():
    try:
        time.sleep(60)
    finally:
        dist.all_reduce(torch.ones(1))

def in_exit():
    with Exit():
        time.sleep(60)

def converted():
    try:
        time.sleep(60)
    except BaseException as error:
        raise RuntimeError("converted") from error

def backward():
    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            time.sleep(60)
            return g
    Wait.apply(torch.ones(1, requires_grad=True)).sum().backward()

def reception():
    dist.recv(torch.zeros(1), 1)

def shipment():
    dist.send(torch.zeros(5_000_000), 1)

def gather():
    dist.new_group([0, 1])

def future():
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

def tolerant_future():
    try:
        future()
    except Exception as error:
        note(type(error).__name__)

LATER = [compute, sleep, take, lock, swallow, in_finally, in_exit, converted, backward]
LATER += [reception, shipment, gather, future, tolerant_future]

loader = DataLoader(Slow(), batch_size=2)
session.protect(weights=weights, loader=loader)
session._engine.unwinder.patience = lambda: 0.15

def train():
    for batch in loader:
        at = session.step
        place = LATER[at] if at < len(LATER) else None
        if place is not None and rank == 0 and first_time(place.__name__):
            begun = time.monotonic()
            try:
                place()
            finally:
                note(f"{place.__name__} {time.monotonic() - begun:.2f}")
        if rank == 1 and (place is not None or at == 16):
            time.sleep(0.15)
            point("die")
        total = batch.clone()
        dist.all_reduce(total)
        with session.commit():
            weights.add_(total.sum())
        if session.step == 20:
            break

session.recoverable(train)()
save(weights=weights.tolist())
"""
)


def test_every_place_is_left_soon_and_the_step_is_repeated(tmp_path: Path, sessions: Server) -> None:
    settings = {"limits.recoveries_without_commit": 40, "limits.same_fault": 40}
    clean = play(
        PLACES.replace("session.recoverable(train)()", "first_time = lambda name: False\nsession.recoverable(train)()"),
        tmp_path / "clean",
        sessions,
        prologue="",
    )
    assert clean.outcome.code == 0, clean.all_said[-3000:]
    faults = [fault("kill", 1, "die", step, birth=None) for step in range(14)] + [fault("kill", 1, "die", 16, birth=None)]
    told = play(PLACES, tmp_path / "run", sessions, *faults, settings=settings, prologue="")
    assert told.outcome.code == 0, told.all_said[-5000:]
    assert told.saved == clean.saved
    assert len(told.outcome.incidents) == 15, [i.fault.detail for i in told.outcome.incidents]
    assert {i.fault.kind for i in told.outcome.incidents} == {"exit"}
    assert [len(i.attempts) for i in told.outcome.incidents] == [1] * 15, [i.attempts for i in told.outcome.incidents]
    slow = {name: took for name, took in (line.split() for line in told.notes[0] if " " in line) if float(took) > 3.0}
    assert not slow


def test_a_rank_that_swallows_every_interruption_is_killed_and_replaced(tmp_path: Path, sessions: Server) -> None:
    body = """
@session.recoverable
def train():
    while session.step < 4:
        if rank == 1 and session.step == 2:
            point("die")
        if rank == 0 and session.step == 2 and not (OUT / "deaf").exists():
            (OUT / "deaf").touch()
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        step()

train()
save(weights=weights.tolist())
"""
    told = play(body, tmp_path, sessions, fault("kill", 1, "die", 2), settings={"deadlines.acknowledge": 0.8})
    assert told.outcome.code == 0, told.all_said[-3000:]
    assert told.saved[0] == told.saved[1] == told.saved[2]
    assert any("rank 0 hung" in attempt.fault.detail for incident in told.outcome.incidents for attempt in incident.attempts)
