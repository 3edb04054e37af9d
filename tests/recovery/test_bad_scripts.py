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


CASES = [
    Case("commit outside a block", "protect()\nstep()", ("session.commit() outside a recoverable block",)),
    Case(
        "nested commit",
        "protect()\n@session.recoverable\ndef train():\n    with session.commit():\n        with session.commit(): pass\ntrain()",
        ("nested session.commit()", "step 0"),
    ),
    Case(
        "nested block",
        "protect()\n@session.recoverable\ndef inner(): pass\n@session.recoverable\ndef outer(): inner()\nouter()",
        ("inner", "inside another block"),
    ),
    Case("async block", "@session.recoverable\nasync def train(): pass", ("train", "coroutine")),
    Case("generator block", "@session.recoverable\ndef train(): yield", ("train", "generator")),
    Case(
        "block off the main thread",
        "protect()\n@session.recoverable\ndef train():\n    steps(2)\ndef other():\n    try: train()\n    except instep.UsageError as error:\n"
        "        print(error, file=sys.stderr)\nt = threading.Thread(target=other)\nt.start()\nt.join()\nsys.exit(3)",
        ("main thread",),
    ),
    Case("no state", "session.protect(model=model, optimizer=optimizer, clock=object())", ("clock", "object")),
    Case(
        "unknown type",
        "class Odd:\n    def state_dict(self): return {'a': [1, {'b': threading.Lock()}]}\n    def load_state_dict(self, s): pass\n"
        "session.protect(odd=Odd())",
        ("odd", "'a'", "'b'", "lock"),
    ),
    Case(
        "different state",
        "extra = torch.full((2,), float(session.rank))\nsession.protect(model=model, optimizer=optimizer, extra=extra)\n"
        "@session.recoverable\ndef train(): steps(2)\ntrain()",
        ("extra", "rank"),
    ),
    Case(
        "unprotected parameters",
        "session.protect(optimizer=optimizer)\n@session.recoverable\ndef train(): steps(2)\ntrain()",
        ("optimizer", "parameter", "protect"),
    ),
    Case(
        "collective in the body",
        "protect()\n@session.recoverable\ndef train():\n    with session.commit():\n        dist.all_reduce(torch.ones(1))\ntrain()",
        ("all_reduce|allreduce", "commit"),
    ),
    Case(
        "draw in the body",
        "protect()\n@session.recoverable\ndef train():\n    with session.commit():\n        torch.rand(1)\ntrain()",
        ("commit body of step 0", "random"),
    ),
    Case(
        "uneven batches",
        "protect()\n@session.recoverable\ndef train():\n    while session.step < 4 - session.rank:\n        with session.commit(): pass\ntrain()",
        ("uneven batches", "rank 1 at step 3", "drop_last"),
    ),
    Case(
        "static graph",
        "fixed = DDP(nn.Linear(4, 2), static_graph=True)\nsession.protect(fixed=fixed)",
        ("fixed", "static_graph"),
    ),
    Case("compiled", "session.protect(compiled=torch.compile(model))", ("compiled", "compile")),
    Case(
        "comm hook",
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
        "model.register_comm_hook(None, fp16_compress_hook)\nsession.protect(model=model)\n"
        "@session.recoverable\ndef train(): steps(2)\ntrain()",
        ("model", "hook"),
    ),
    Case("join", "protect()\n@session.recoverable\ndef train():\n    with model.join(): steps(2)\ntrain()", ("join",)),
    Case("second init", "instep.init()", ("init", "twice")),
    Case("late protect", "protect()\n@session.recoverable\ndef train(): session.protect(more=torch.ones(1))\ntrain()", ("more", "before")),
    Case("dies in set-up", "if session.rank == 1: raise ValueError('no data here')\nprotect()", ("no data here", "rank 1")),
    Case(
        "raises on every step",
        "protect()\n@session.recoverable\ndef train():\n    step()\n    raise KeyError('a bug')\ntrain()",
        ("a bug", "rank", "step"),
    ),
    Case("exit in the block", "protect()\n@session.recoverable\ndef train(): sys.exit(5)\ntrain()", (r"sys.exit\(5\)",)),
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
    lines = said.splitlines()
    return "\n".join([lines[0], *(line for line in lines[1:] if re.match(r"(\[rank\d+\]: )?(\w+\.)*\w*Error: |.*only the main thread", line))])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_error_says_what_where_and_what_to_do(case: Case, tmp_path: Path, server: Server) -> None:
    outcome, said = start(PROLOGUE + textwrap.dedent(case.script), tmp_path, server)

    assert outcome.code not in (0, None)
    told = errors(said)
    for text in case.says:
        assert text in told or re.search(text, told), f"{text!r} is not in:\n{told}\n\nall:\n{said[-3000:]}"


def test_full_shared_memory(tmp_path: Path) -> None:
    """Records live in anonymous memory, not in /dev/shm: a job does not care when that is full. Needs leave to mount in a namespace."""
    inside = f"mount -t tmpfs -o size=4k none /dev/shm && dd if=/dev/zero of=/dev/shm/filler bs=4k count=1 status=none && exec {sys.executable} -m"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{inside} instep drill --ranks 2 --steps 4 --kill 1@2 --json"]
    if subprocess.run([*command[:5], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespaces")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
