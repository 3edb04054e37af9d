"""The folder of checkpoints: what is complete, why the rest is not, what is kept, and who writes which tensor."""

import json
from pathlib import Path

import pytest
import torch
import xxhash

from instep.model import Address, Plan, Status, Unrecoverable, Vote
from instep.torch.overlay import names
from instep.torch.shared import Shared
from instep_state_replica import checkpoint_files as files
from instep_state_replica.checkpoint import Checkpoint
from instep_state_replica.checkpoint_plan import decide
from instep_state_replica.checkpoint_save import writer_of

WORLD = 3


def write(directory: Path, step: int, *, save: str = "a", ranks: tuple[int, ...] = (0, 1, 2), **fields: object) -> Path:
    """A checkpoint of parts that hold their rank."""
    folder = directory / files.name(step)
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        files.part(folder, rank).write_bytes(bytes([rank] * 10))
        told = {"run": "r", "save": save, "step": step, "block": 0, "world": WORLD, "rank": rank, "bytes": 10, "digests": {}, **fields}
        files.receipt(folder, rank).write_text(files.Receipt.model_validate(told).pack())
    return folder


def why(folder: Path) -> str:
    """Why a checkpoint is not usable."""
    with pytest.raises(files.Unusable) as caught:
        files.read(folder, WORLD)
    return str(caught.value)


def test_a_complete_one_is_read(tmp_path: Path) -> None:
    found = files.read(write(tmp_path, 8), WORLD)
    assert (found.name, found.step, found.block, found.run) == ("step-0000000008", 8, 0, "r")


def test_what_is_lacking_or_damaged_is_named(tmp_path: Path) -> None:
    assert why(tmp_path / files.name(1)) == "incomplete, without any part"
    assert why(write(tmp_path, 2, ranks=(0,))) == "incomplete, without the parts of ranks [1, 2]"
    folder = write(tmp_path, 3)
    write(tmp_path, 3, ranks=(1,), save="b")
    assert why(folder) == "incomplete, with parts of several saves"
    assert why(write(tmp_path, 4, world=4)) == "of a job of 4 ranks, not 3"
    folder = write(tmp_path, 5)
    files.part(folder, 2).write_bytes(b"short")
    assert why(folder) == "damaged: the part of rank 2 has 5 of 10 bytes"
    files.part(folder, 2).unlink()
    assert "the part of rank 2 cannot be found" in why(folder)
    assert "with parts of several saves" in why(write(tmp_path, 6).rename(tmp_path / files.name(7)))


@pytest.mark.parametrize("harm", ["flip", "empty", "list", "other rank", "binary"])
def test_a_receipt_that_is_not_as_it_was_written_is_damaged(harm: str, tmp_path: Path) -> None:
    folder = write(tmp_path, 8)
    path = files.receipt(folder, 1)
    text = path.read_text()
    changed = {"flip": text.replace("8", "9", 1), "empty": "", "list": json.dumps([1]), "other rank": files.receipt(folder, 2).read_text()}
    path.write_bytes(changed[harm].encode() if harm in changed else bytes(range(256)))
    assert why(folder).startswith("damaged: the receipt of rank 1 cannot be read")


def test_pruning_keeps_the_newest_complete_ones_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    write(tmp_path, 3, ranks=(0,))
    write(tmp_path, 8, ranks=(0, 1))
    (tmp_path / "notes").mkdir()
    files.prune(tmp_path, WORLD, keep=2, but=(files.name(8),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", files.name(4), files.name(6), files.name(8)]
    files.prune(tmp_path, WORLD, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", files.name(6), files.name(8)]


def test_one_known_as_damaged_is_none_of_those_to_keep(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    files.prune(tmp_path, WORLD, keep=2, damaged=(files.name(8), files.name(4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.name(2), files.name(4), files.name(6), files.name(8)]
    files.prune(tmp_path, WORLD, keep=1, damaged=(files.name(8),))
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.name(6), files.name(8)]


def test_a_successor_removes_what_its_rank_did_not_finish(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    for path in (files.part(folder, 0), files.receipt(folder, 1)):
        files.unfinished(path).write_bytes(b"")
    files.tidy(tmp_path, 1)
    assert [path.name for path in folder.glob("*.new")] == ["rank-00000.safetensors.new"]


def test_replicas_share_the_writing_evenly_and_agree() -> None:
    sizes = [5, 100, 1, 40, 60, 0, 7]
    owners = writer_of(sizes, (4, 1, 9))
    assert owners == writer_of(sizes, (4, 1, 9))
    load = {rank: sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in (4, 1, 9)}
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) == 100


def test_tensors_have_names_of_their_own_in_the_order_of_the_schema() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shared = Shared()
    shared.add("model", model)
    shared.add("optimizer", optimizer)
    shared.check_coverage()
    schema, tensors = shared.world.describe()
    found = names(schema)
    assert len(found) == len(set(found)) == len(tensors)
    by_name = dict(zip(found, tensors, strict=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(by_name[f"model.{name}"], parameter)


def votes(*, step: int = 9, notes: object = None, fresh: tuple[int, ...] = (0, 1, 2)) -> list[Vote]:
    """All ranks hold one group together."""
    return [
        Vote(
            rank=rank, birth=0, incarnation=1, block=0, step=0 if rank in fresh else step, groups=(), shards={"replica": (0, 1, 2)},
            status=Status.FRESH if rank in fresh else Status.TORN, address=Address(rank=rank, birth=0, host="h"),
            notes={} if notes is None or rank != 2 else {"own": notes},
        )
        for rank in range(WORLD)
    ]  # fmt: skip


def test_the_newest_usable_one_is_planned_and_the_others_are_named(tmp_path: Path) -> None:
    settings = Checkpoint(dir=str(tmp_path), every=1)
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    write(tmp_path, 10, ranks=(1,))
    made = decide(votes(notes={"damaged": {files.name(8): "damaged: so"}}), settings, plugin="own")
    assert isinstance(made, Plan)
    assert (made.step, made.checkpoint) == (6, files.name(6))
    assert made.skipped == (f"{files.name(10)} is incomplete, without the parts of ranks [0, 2]", f"{files.name(8)} is damaged: so")
    ahead = decide(votes(step=3, fresh=(0,)), settings, plugin="own")
    assert isinstance(ahead, Plan)
    assert ahead.step == 4
    assert f"{files.name(8)} is ahead of what the ranks have reached" in ahead.skipped


def test_none_is_an_answer_that_names_all(tmp_path: Path) -> None:
    write(tmp_path, 2, ranks=(1,))
    write(tmp_path, 4, block=1)
    made = decide(votes(), Checkpoint(dir=str(tmp_path), every=1), plugin="own")
    assert isinstance(made, Unrecoverable)
    assert "no rank holds a complete step" in made.why
    for part in (str(tmp_path), f"{files.name(2)} is incomplete", f"{files.name(4)} is of block 1"):
        assert part in made.checkpoint
    assert decide(votes(), None, plugin="own") == made.model_copy(update={"checkpoint": ""})


def test_a_receipt_carries_a_digest_of_itself() -> None:
    packed = json.loads(files.Receipt(run="r", save="s", step=1, block=0, world=1, rank=0, bytes=0, digests={"é": "00"}).pack())
    assert packed["digest"] == xxhash.xxh3_64_hexdigest(packed["receipt"].encode())
