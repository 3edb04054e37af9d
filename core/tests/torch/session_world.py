"""Runs short scripts of a session under the real agent, and hands back what every rank wrote."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from instep import config
from instep.agent.agent import Launch, Outcome, run
from instep.agent.events import Action, Event
from instep.agent.spawner import Server
from instep.messages import Injection

PROLOGUE = """
import json, os, queue, sys, threading, time, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import instep
from instep.testing import point

warnings.simplefilter("ignore")
OUT = Path(os.environ["SESSION_OUT"])
torch.set_num_threads(1)
session = instep.init()
rank = session.rank
torch.manual_seed(7)
weights = torch.zeros(4)
session.protect(weights=weights)

def save(**values):
    (OUT / f"{rank}.json").write_text(json.dumps(values))

def note(text):
    with (OUT / f"{rank}.notes").open("a") as file:
        file.write(text + "\\n")

def step():
    gradient = torch.full((4,), float(rank + 1) * (session.step + 1)) + torch.rand(4)
    dist.all_reduce(gradient)
    with session.commit():
        weights.add_(gradient)

"""


@dataclass(frozen=True)
class Told:
    """How a job ended, what its ranks saved and noted, and everything that was printed."""

    outcome: Outcome
    saved: list[dict[str, object]]
    notes: list[list[str]]
    printed: str

    @property
    def all_said(self) -> str:
        return self.outcome.message + "\n" + self.printed


def play(
    body: str,
    out: Path,
    server: Server,
    *faults: Injection,
    ranks: int = 3,
    settings: Mapping[str, object] | None = None,
    on_event: Callable[[Event | Action], None] | None = None,
    max_restarts: int = 0,
    prologue: str = PROLOGUE,
) -> Told:
    """Run ``PROLOGUE`` and ``body`` on ``ranks`` ranks."""
    out.mkdir(exist_ok=True)
    script, logs = out / "script.py", out / "logs"
    script.write_text(prologue + textwrap.dedent(body))
    values = {"watchdog.stall": 4.0, "deadlines.acknowledge": 4.0, **(settings or {})}
    launch = Launch(
        script=str(script),
        nproc=ranks,
        config=config.load(overrides=values).config,
        injections=faults,
        log_dir=str(logs),
        quiet=True,
        env={"SESSION_OUT": str(out)},
        on_event=on_event,
        max_restarts=max_restarts,
    )
    outcome = run(launch, server=server)
    saved = [json.loads(p.read_text()) if (p := out / f"{r}.json").exists() else {} for r in range(ranks)]
    notes = [p.read_text().splitlines() if (p := out / f"{r}.notes").exists() else [] for r in range(ranks)]
    return Told(outcome, saved, notes, "".join(p.read_text() for p in sorted(logs.glob("*"))))


def fault(kind: str, rank: int, point: str, step: int | None = None, *, birth: int | None = 0) -> Injection:
    """A fault placed at a point; only in the first birth unless told otherwise."""
    return Injection(id=100 * rank + (step or 0), rank=rank, kind=kind, step=step, point=point, birth=birth)


def same(told: Sequence[Told]) -> None:
    """Both runs ended well, and their ranks saved the same."""
    for one in told:
        assert one.outcome.code == 0, one.all_said[-4000:]
    assert told[0].saved == told[1].saved
