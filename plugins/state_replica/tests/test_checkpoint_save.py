"""Saving beside training: who waits for slow storage, what cuts the wait, and what a failure leaves behind."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from instep.hooks import SharedState
from instep.torch.shared import Shared
from instep_state_replica import checkpoint_files as files
from instep_state_replica import checkpoint_save
from instep_state_replica.checkpoint_save import Saver

SECONDS = 20.0


class Held:
    """``hooks.Holding`` of one rank with a tensor."""

    block, settled, loads = 0, True, False

    def __init__(self) -> None:
        self.tensor = torch.arange(6.0)
        self._shared = Shared()
        self._shared.add("tensor", self.tensor)
        self._shared.check_coverage()

    def shards(self) -> Sequence[SharedState]:
        return self._shared.shares()

    def record(self, step: int) -> bytes:
        return b"private %d" % step

    def take(self, step: int, record: bytes) -> None:
        raise NotImplementedError

    def load(self, step: int | None) -> int:
        raise NotImplementedError


class Storage:
    """Stands in for ``save_file``: waits until it may write, or fails."""

    def __init__(self) -> None:
        self.free, self.broken = threading.Event(), False
        self._save = save_file

    def __call__(self, tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
        assert self.free.wait(SECONDS)
        path.write_bytes(b"begun")
        if self.broken:
            raise OSError(28, "No space left on device")
        self._save(dict(tensors), path, dict(metadata))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage()
    monkeypatch.setattr(checkpoint_save, "save_file", made)
    yield made
    made.free.set()


def saver(directory: Path, patience: float = SECONDS) -> Saver:
    return Saver(directory, "run", rank=0, world=1, keep=2, patience=patience)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "instep-checkpoint"]


def test_what_is_saved_is_the_state_of_the_commit_whatever_training_does_then(storage: Storage, tmp_path: Path) -> None:
    held, writer = Held(), saver(tmp_path)
    writer.save(held, 4, "a")
    held.tensor.zero_()
    storage.free.set()
    writer.close()
    assert threads() == []
    found = files.read(tmp_path / files.name(4), 1)
    tensors = load_file(files.part(found.folder, 0))
    assert torch.equal(tensors["replica/tensor"], torch.arange(6.0))
    assert bytes(tensors["record/0"].numpy()) == b"private 4"
    assert set(tensors) == set(found.receipts[0].digests)


def test_one_that_is_due_too_soon_is_left_out_by_name(storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held, writer = Held(), saver(tmp_path, patience=0.05)
    writer.save(held, 4, "a")
    writer.save(held, 5, "a")
    assert "checkpoint of step 5 is left out: rank 0 still writes the one before" in caplog.text
    storage.free.set()
    for thread in threading.enumerate():
        if thread.name == "instep-checkpoint":
            thread.join(SECONDS)
    writer.save(held, 6, "a")
    saver_threads = [thread for thread in threading.enumerate() if thread.name == "instep-checkpoint"]
    for thread in saver_threads:
        thread.join(SECONDS)
    assert sorted(folder.name for folder in files.folders(tmp_path)) == [files.name(4), files.name(6)]


def test_a_fault_cuts_the_wait(storage: Storage, tmp_path: Path) -> None:
    held, writer = Held(), saver(tmp_path)
    writer.save(held, 4, "a")
    waiting = threading.Thread(target=writer.save, args=(held, 5, "a"))
    waiting.start()
    while waiting.is_alive():  # as the control thread does: again until main unwinds
        writer.interrupt()
        waiting.join(0.01)
    assert not storage.free.is_set()
    assert len(threads()) == 1
    storage.free.set()
    writer.close()
    assert threads() == []


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage.broken = True
    storage.free.set()
    writer = saver(tmp_path)
    with caplog.at_level(logging.ERROR):
        writer.save(Held(), 4, "a")
        writer.close()
    assert "rank 0 could not save its part" in caplog.text
    assert "No space left on device" in caplog.text
    assert list((tmp_path / files.name(4)).iterdir()) == []
