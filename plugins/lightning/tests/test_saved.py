"""Checkpoints on disk are read without unpickling, and what is wrong with one is told by name. No job runs here."""

import pickle
from pathlib import Path

import pytest
import torch
from light_damage import cut, flip, unpickle

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'instep-lightning[lightning]'")

from torch.distributed.checkpoint import state_dict_saver

from instep_lightning import sharded, zipped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes the parts
STATE = {"state_dict": {"weight": torch.arange(4096.0)}, "epoch": 3, "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1}]}]}


class Mischief:
    """What an unpickler would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("unpickled"),)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "whole.ckpt")
    return tmp_path / "whole.ckpt"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts.ckpt"
    state_dict_saver.save({"state_dict": STATE["state_dict"], "optimizer_0": {"lr": 0.1}}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 3}, folder / "meta.pt")
    return folder


def read(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        zipped.intact(file)
    return zipped.load(str(path))


def test_a_whole_one(whole: Path) -> None:
    found = read(whole)

    assert torch.equal(found["state_dict"]["weight"], torch.arange(4096.0))  # type: ignore[index]
    assert found["epoch"] == 3


@pytest.mark.parametrize(
    ("harm", "why"), [(flip, "another checksum"), (cut, "damaged or incomplete"), (unpickle, "it holds pathlib.PosixPath")]
)
def test_a_whole_one_that_cannot_be_loaded(harm: object, why: str, whole: Path) -> None:
    harm(whole)  # type: ignore[operator]

    with pytest.raises(zipped.Unusable, match=why):
        read(whole)


def test_nothing_runs_that_stands_in_a_file(whole: Path, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Mischief()}, whole)
    (parts / ".metadata").write_bytes(pickle.dumps(Mischief()))
    with pytest.raises(zipped.Unusable, match="would have to be unpickled"):
        read(whole)
    with pytest.raises(zipped.Unusable, match="has no place in it"):
        sharded.check(str(parts), rank=0, ranks=1)
    whole.write_bytes(pickle.dumps({"state_dict": Mischief()}))
    with pytest.raises(zipped.Unusable):
        zipped.load(str(whole))

    assert not Path("unpickled").exists()


def test_parts(parts: Path) -> None:
    for rank in range(3):
        sharded.check(str(parts), rank=rank, ranks=3)

    assert zipped.load(sharded.about(str(parts))) == {"epoch": 3}


@pytest.mark.parametrize(
    ("harm", "why"), [(flip, "another checksum"), (cut, "bytes of at least"), (Path.unlink, "has 0 bytes of at least")]
)
def test_parts_that_cannot_be_loaded(harm: object, why: str, parts: Path) -> None:
    (part,) = parts.glob("*.distcp")
    harm(part)  # type: ignore[operator]

    with pytest.raises(zipped.Unusable, match=why):
        sharded.check(str(parts), rank=0, ranks=1)


def test_parts_without_their_description(parts: Path) -> None:
    (parts / ".metadata").unlink()

    with pytest.raises(zipped.Unusable, match="incomplete"):
        sharded.check(str(parts), rank=0, ranks=1)
