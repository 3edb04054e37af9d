"""Scripts that break the loop contract: each ends the job at once with an error that says what, where, and what to do."""

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from instep import config
from instep.agent.agent import Launch, Outcome, run
from instep.agent.spawner import Server

PROLOGUE = """
import sys, threading
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import instep

session = instep.init()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def forward_backward():
    model(torch.ones(3, 4)).sum().backward()

def step():
    forward_backward()
    with session.commit():
        optimizer.step()
        optimizer.zero_grad()

def protect():
    session.protect(model=model, optimizer=optimizer)

def steps(count):
    while session.step < count:
        step()
"""


@dataclass(frozen=True)
class Case:
    """A script's rest, and what its error must say."""

    name: str
    script: str
    says: tuple[str, ...]


def block(body: str, *, protect: str = "protect()") -> str:
    """A script that trains in a recoverable block."""
    return f"{protect}\n@session.recoverable\ndef train():\n{textwrap.indent(body, '    ')}\ntrain()"


IN_A_THREAD = """
protect()
@session.recoverable
def train():
    steps(2)
def other():
    try:
        train()
    except instep.UsageError as error:
        print(error, file=sys.stderr)
thread = threading.Thread(target=other)
thread.start()
thread.join()
sys.exit(3)
"""
ODD_STATE = """
class Odd:
    def state_dict(self): return {'a': [1, {'b': threading.Lock()}]}
    def load_state_dict(self, state): pass
session.protect(odd=Odd())
"""
COMM_HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)
"""
EXTRA = "session.protect(model=model, optimizer=optimizer, extra=torch.full((2,), float(session.rank)))"

CASES = [
    Case("commit outside a block", "protect()\nstep()", (r"commit\(\) outside a recoverable block",)),
    Case("nested commit", block("with session.commit():\n    with session.commit(): pass"), (r"nested session.commit\(\)", "step 0")),
    Case("nested block", block("session.recoverable(steps)(2)"), ("steps", "inside another block")),
    Case("async block", "@session.recoverable\nasync def train(): pass", ("train", "coroutine")),
    Case("generator block", "@session.recoverable\ndef train(): yield", ("train", "generator")),
    Case("block off the main thread", IN_A_THREAD, ("main thread",)),
    Case("no state", "session.protect(model=model, optimizer=optimizer, clock=object())", ("clock", "object")),
    Case("unknown type", ODD_STATE, ("odd", "'a'", "'b'", "lock")),
    Case("different state", block("steps(2)", protect=EXTRA), ("'extra' differs between ranks",)),
    Case(
        "unprotected parameters", block("steps(2)", protect="session.protect(optimizer=optimizer)"), ("optimizer", "parameter 0", "protect")
    ),
    Case("collective in the body", block("with session.commit(): dist.all_reduce(torch.ones(1))"), ("allreduce", "commit body")),
    Case("draw in the body", block("with session.commit(): torch.rand(1)"), ("commit body of step 0", "random")),
    Case(
        "uneven batches",
        block("while session.step < 4 - session.rank:\n    with session.commit(): pass"),
        ("uneven batches", "rank 1 at step 3", "drop_last"),
    ),
    Case("static graph", "session.protect(fixed=DDP(nn.Linear(4, 2), static_graph=True))", ("fixed", "static_graph")),
    Case("compiled", "session.protect(compiled=torch.compile(model))", ("compiled", "compile")),
    Case("comm hook", COMM_HOOK + block("steps(2)"), ("model", "hook")),
    Case("join", block("with model.join(): steps(2)"), (r"join\(\)",)),
    Case("second init", "instep.init()", ("init", "twice")),
    Case("late protect", block("session.protect(more=torch.ones(1))"), ("more", "before")),
    Case("dies in set-up", "if session.rank == 1: raise ValueError('no data here')\nprotect()", ("no data here", "rank 1")),
    Case(
        "raises on every step",
        block("while True:\n    if session.step == 2: raise KeyError('a bug')\n    step()"),
        # On a busy machine the other rank may raise it in the recovery, which then is the fruitless one.
        ("a bug", "same fault|recoveries in a row", "step 2"),
    ),
    Case("exit in the block", block("sys.exit(5)"), (r"sys.exit\(5\)",)),
]


def start(script: str, directory: Path, server: Server) -> tuple[Outcome, str]:
    """Run a script; how it ended, and everything that was said."""
    path, logs = directory / "script.py", directory / "logs"
    path.write_text(script)
    settings = config.load(overrides={"watchdog.stall": 2.0}).config
    outcome = run(Launch(script=str(path), nproc=2, config=settings, log_dir=str(logs), quiet=True), server=server)
    return outcome, outcome.message + "\n" + "".join(p.read_text() for p in sorted(logs.glob("*")))


def errors(said: str) -> str:
    """What the job's last message and the raised errors say, without the source lines that tracebacks show."""
    first, *lines = said.splitlines()
    shown = re.compile(r"(\[rank\d+\]: )?(\w+\.)*\w*Error: |.*only the main thread")
    return "\n".join([first, *filter(shown.match, lines)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_error_says_what_where_and_what_to_do(case: Case, tmp_path: Path, server: Server) -> None:
    outcome, said = start(PROLOGUE + case.script, tmp_path, server)

    assert outcome.code not in (0, None)
    told = errors(said)
    for pattern in case.says:
        assert re.search(pattern, told), f"{pattern!r} is not in:\n{told}\n\nall:\n{said[-3000:]}"


def test_full_shared_memory(tmp_path: Path) -> None:
    """Records live in anonymous memory, not in /dev/shm: a job does not care when that is full. Needs leave to mount in a namespace."""
    fill = "mount -t tmpfs -o size=4k none /dev/shm && dd if=/dev/zero of=/dev/shm/filler bs=4k count=1 status=none"
    drill = f"exec {sys.executable} -m instep drill --ranks 2 --steps 4 --kill 1@2 --json"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{fill} && {drill}"]
    if subprocess.run([*command[:3], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespaces")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
