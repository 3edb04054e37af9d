"""The laws that this plugin keeps, in real jobs too; and a damaged copy."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instep.errors import InstepError
from instep.model import IncidentReport
from instep.testing import Faults, Jobs, Script, StateContract
from instep.testing.jobs import DRILL_JOB
from my_restore import MyRestore, files

NVME = tempfile.TemporaryDirectory(prefix="my-restore-")


class TestMyRestore(StateContract):
    plugin = MyRestore
    settings = {"directory": NVME.name}


def test_one_changed_bit_is_seen(tmp_path: Path) -> None:
    path, tensors = tmp_path / "copy", [torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0), torch.tensor(7)]
    files.write(path, b"schema", tensors)
    back = [torch.zeros_like(t) for t in tensors]
    assert (files.schema(path), files.read(path, back)) == (b"schema", 34)
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))
    raw = bytearray(path.read_bytes())
    raw[20] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InstepError, match="damaged"):
        files.read(path, back)


def test_every_incident_is_written_down(tmp_path: Path, incident: Callable[..., IncidentReport]) -> None:
    plugin = MyRestore(directory=str(tmp_path))
    plugin.report(incident(incident=1))
    plugin.report(incident(incident=2, bytes_moved=77))
    lines = [json.loads(line) for line in (tmp_path / "restores.jsonl").read_text().splitlines()]
    assert [(line["incident"], line["bytes"]) for line in lines] == [(1, 4096), (2, 77)]


def test_too_many_losses_at_once_take_the_next_rung(job: Jobs, faults: Faults, tmp_path: Path) -> None:
    both = faults.kill(rank=1).at(step=3, phase="forward").kill(rank=2).at(phase="connect")  # while rank 1 is being replaced
    settings = {"plugins.my_restore": {"directory": str(tmp_path), "most": 1}}
    run = job.run(Script(DRILL_JOB, module=True, steps=6), both, settings)
    assert run.outcome.code == 70
    assert "2 ranks were lost at once" in run.outcome.message
