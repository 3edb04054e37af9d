"""Checkpoints of the script's own: a job that loads one goes on with the very batch that follows, faults or not."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from instep import config
from instep.agent.agent import Launch, run
from instep.agent.spawner import Server
from instep.messages import Injection

RANKS, STEPS = 3, 24
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import instep

kind, save, load, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 24
torch.set_num_threads(1)
session = instep.init(step=load)
torch.manual_seed(0)
data = TensorDataset(torch.randn(120, 8), torch.arange(120))
sampler = DistributedSampler(data)
if kind == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler)
else:
    loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
file = Path(f"saved-{session.rank}.pt")
saved = torch.load(file) if load else None
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if kind == "stateful":
        loader.load_state_dict(saved["loader"])
session.protect(model=model, optimizer=optimizer, loader=loader)
if saved and kind == "plain":
    loader.epoch = saved["epoch"]
seen = Path(f"seen-{load}-{session.rank}.jsonl")

@session.recoverable
def train():
    while session.step < steps:
        epoch = session.step // len(loader)
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y % 4).backward()
            with session.commit():
                optimizer.step()
                optimizer.zero_grad()
            with seen.open("a") as lines:
                lines.write(json.dumps([session.step, y.tolist()]) + "\\n")
            if session.step == save:
                place = {"loader": loader.state_dict()} if kind == "stateful" else {"epoch": epoch + 1}
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **place}, file)
            if session.step == steps:
                break

train()
"""


def train(directory: Path, server: Server, *args: object, kills: Sequence[tuple[int, int]] = ()) -> dict[int, list[list[int]]]:
    """Run the script; the samples of each rank in each step that it did."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    placed = tuple(Injection(id=i, rank=r, kind="kill", step=s, point="record") for i, (r, s) in enumerate(kills, start=1))
    settings = config.load(overrides={"plugins.init_gloo": True, "plugins.state_replica": True}, environ={}).config
    job = Launch(
        str(script), args=[str(a) for a in args], nproc=RANKS, config=settings, injections=placed, quiet=True, log_dir=str(directory)
    )
    outcome = run(job, server=server)
    assert outcome.code == 0, outcome.message + "".join(log.read_text() for log in directory.glob("rank-*.log"))
    assert len(outcome.incidents) == len(kills)
    steps: dict[int, list[list[int]]] = {}
    for rank in range(RANKS):
        for line in (directory / f"seen-{args[2]}-{rank}.jsonl").read_text().splitlines():
            step, samples = json.loads(line)
            steps.setdefault(step, []).append(samples)
    return steps


@pytest.mark.parametrize(("kind", "save"), [("plain", 20), ("stateful", 13)])
def test_a_loaded_job_goes_on_with_the_next_batch(
    kind: str, save: int, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    whole = train(tmp_path, server, kind, save, 0, kills=[(1, 5), (2, save)])
    assert list(whole) == list(range(1, STEPS + 1))
    rest = train(tmp_path, server, kind, 0, save, kills=[(0, save + 1), (1, save + 3)])
    assert rest == {step: samples for step, samples in whole.items() if step > save}
