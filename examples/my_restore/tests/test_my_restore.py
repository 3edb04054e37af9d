"""The laws that this plugin keeps, in real jobs too; and a damaged copy."""

import tempfile
from pathlib import Path

import pytest
import torch

from instep.errors import InstepError
from instep.testing import StateContract
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
