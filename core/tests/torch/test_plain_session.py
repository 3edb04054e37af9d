"""The session without recovery: without ``instep run``, and with ``enabled = false``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from session_world import PROLOGUE, play

from instep.agent.spawner import Server
from instep.plain import PlainSession
from instep.session import Session

TRAIN = """
from torch.utils.data import DataLoader

loader = DataLoader(torch.arange(6.0), batch_size=2, shuffle=True)
session.protect(loader=loader, private={"generator": torch.Generator()})
seen = []

@session.recoverable
def train(more, *, times=1):
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            step()
            seen.append(sorted(batch.tolist()))
    return more * times

value = train([1], times=2)
save(
    value=value, step=session.step, weights=weights.tolist(), seen=len(seen), once=session.once(lambda: {"a": 1}),
    rank=session.rank, world=session.world_size, local=session.local_rank, device=str(session.device),
    incarnation=session.incarnation, incidents=session.incidents, epoch=loader.epoch,
)
session.close()
"""


def alone(body: str, out: Path) -> "subprocess.CompletedProcess[str]":
    script = out / "script.py"
    script.write_text(PROLOGUE.replace('warnings.simplefilter("ignore")', "") + body)
    env = {k: v for k, v in os.environ.items() if not k.startswith("INSTEP_")} | {"SESSION_OUT": str(out)}
    return subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=50, check=False)


def test_a_script_runs_without_instep_run_and_is_told_once(tmp_path: Path) -> None:
    done = alone(TRAIN.replace("            step()", "            with session.commit(): weights.add_(1)"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("without `instep run`") == 1
    saved = json.loads((tmp_path / "0.json").read_text())
    assert saved["value"] == [1, 1]
    assert saved["once"] == {"a": 1}
    assert (saved["step"], saved["seen"], saved["rank"], saved["world"]) == (6, 6, 0, 1)


def test_errors_of_the_contract_come_without_recovery_too(tmp_path: Path) -> None:
    body = """
def says(call):
    try:
        call()
    except instep.UsageError as error:
        return str(error)

def commit():
    with session.commit():
        pass

async def coroutine():
    pass

@session.recoverable
def nested():
    session.recoverable(lambda: None)()

@session.recoverable
def twice():
    with session.commit():
        commit()

save(outside=says(commit), nested=says(nested), coroutine=says(lambda: session.recoverable(coroutine)), twice=says(twice),
     init=says(instep.init), step=session.step)
"""
    done = alone(body, tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "0.json").read_text())
    assert saved.pop("step") == 0
    assert all(saved.values()), saved


def test_a_job_that_is_switched_off_passes_everything_through(tmp_path: Path, sessions: Server) -> None:
    off = play(TRAIN, tmp_path / "off", sessions, ranks=2, settings={"enabled": False})
    on = play(TRAIN, tmp_path / "on", sessions, ranks=2)
    assert off.outcome.code == on.outcome.code == 0, off.all_said[-3000:]
    assert off.saved == on.saved


def test_both_sessions_offer_the_same() -> None:
    assert {n for n in dir(Session) if not n.startswith("_")} - {n for n in dir(PlainSession) if not n.startswith("_")} <= {
        *("step", "rank", "world_size", "local_rank"),  # plain attributes there
    }
