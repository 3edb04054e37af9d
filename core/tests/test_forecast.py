"""``instep plan``: what it says of a loss is what core's plan does with the votes, whatever the layout."""

import itertools
import json
from pathlib import Path

import pytest

from instep import forecast, layouts
from instep.cli.main import main
from instep.errors import UsageError
from instep.layouts import GroupLayout, Layout
from instep.model import Plan, ShardSize
from instep.plan import plan

GB = 10**9
MEGATRON = "megatron:tp=2,pp=2,dp=4,instances=2"


def described(text: str, ranks: int | None = None, **more: object) -> Layout:
    return layouts.describe(text, ranks=ranks, size=GB).model_copy(update=more)


@pytest.mark.parametrize(
    ("layout", "size"),
    [("ddp", 4), ("fsdp", 4), ("zero1", 4), ("hsdp=2x2", None), ("hsdp=2x3", None), (MEGATRON, None), ("megatron:tp=2,dp=2", None)],
)
def test_each_kind_has_all_of_the_state_once_and_replicas_that_agree(layout: str, size: int | None) -> None:
    found = described(layout, size)
    assert abs(sum(group.bytes for group in found.groups) - GB) < 64
    for name in {group.name for group in found.groups}:
        assert sum(group.name == name for group in found.groups) == 1
    assert {rank for group in found.groups for rank in group.replicas} == set(range(found.ranks))


def test_every_loss_of_two_twins_and_no_other_pair_is_fatal_for_hsdp() -> None:
    layout = described("hsdp=2x3")
    fatal = {pair for pair in itertools.combinations(range(6), 2) if not forecast.judge(layout, pair).survivable}
    assert fatal == {(0, 3), (1, 4), (2, 5)}
    assert {loss.lose for loss in forecast.fatal(layout)} == fatal
    assert "shard group 'shards@1'" in forecast.judge(layout, (1, 4)).why


def test_megatron_with_two_instances_has_one_twin_for_each_rank() -> None:
    layout = described(MEGATRON)
    assert layout.ranks == 16
    assert all(loss.survivable for loss in forecast.singles(layout))
    assert [loss.lose for loss in forecast.fatal(layout)] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    one = described("megatron:tp=2,pp=2,dp=4")
    assert not any(loss.survivable for loss in forecast.singles(one))


def test_buddies_save_a_rank_unless_its_buddy_is_lost_too() -> None:
    bare, kept = described("fsdp", 6), described("fsdp", 6, buddies=True, buddy_distance=2)
    assert not forecast.judge(bare, [1]).survivable
    loss = forecast.judge(kept, [1], bandwidth=GB / 6)
    assert (loss.survivable, loss.steps_lost) == (True, 1)
    assert loss.transfers == (forecast.Transfer(group="shards@1", senders=(3,), receivers=(1,), bytes=GB // 6),)
    assert loss.seconds == pytest.approx(1.0)
    assert not forecast.judge(kept, [1, 3]).survivable
    assert forecast.judge(kept, [1, 2]).survivable
    costs = forecast.cost(kept)
    assert costs == forecast.Buddies(distance=2, bytes_per_step=GB // 6, memory=4 * (GB // 6))
    assert forecast.cost(bare) is None


def test_what_is_sent_is_what_the_plan_says() -> None:
    layout = described(MEGATRON)
    loss = forecast.judge(layout, [5], bandwidth=float(GB))
    made = plan(forecast.votes(layout, [5]))
    assert isinstance(made, Plan)
    assert {move.group: move.senders for move in loss.transfers} == {name: donors for name, donors in made.donors.items() if donors}
    assert loss.bytes == sum(group.bytes for group in layout.of(5))
    assert loss.seconds == pytest.approx(loss.bytes / GB)


def test_buddies_are_on_other_machines_when_there_are_some() -> None:
    assert described("fsdp", 8, ranks_per_machine=4).distance == 4
    assert described("fsdp", 8, ranks_per_machine=8).distance == 1
    assert described("fsdp", 8).distance == 1


def test_a_layout_that_ranks_told_reads_back(tmp_path: Path) -> None:
    told = {rank: {"replica": ShardSize(replicas=(0, 1), bytes=12), f"own@{rank}": ShardSize(replicas=(rank,), bytes=5)} for rank in (1, 0)}
    layout = layouts.of_ranks(told, buddies=1, buddy_distance=1)
    (tmp_path / layouts.FILE).write_text(layout.model_dump_json())
    assert layouts.read(tmp_path) == layout
    assert layout.groups[0] == GroupLayout(name="replica", replicas=(0, 1), bytes=12)
    toml = tmp_path / "mine.toml"
    toml.write_text('ranks = 2\n[[groups]]\nname = "all"\nreplicas = [0, 1]\nbytes = "2GB"\n')
    assert layouts.read(toml).groups == (GroupLayout(name="all", replicas=(0, 1), bytes=2 * GB),)


@pytest.mark.parametrize(
    "text", ["ranks = 2\n[[groups]]\nname='a'\nreplicas=[0, 2]\nbytes=1", "ranks = 0\ngroups=[]", "ranks = 2\ngroups = 3", "ranks ="]
)
def test_a_wrong_layout_is_bad_usage_and_names_the_file(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(UsageError, match=r"wrong\.toml|rank 2"):
        layouts.read(file)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--layout", "ddp", "--ranks", "4"], 0),
        (["--layout", "ddp", "--ranks", "4", "--lose", "0,1,2,3"], 3),
        (["--layout", "hsdp=2x2", "--lose", "1,3"], 3),
        (["--layout", "hsdp=2x2", "--lose", "0,1"], 0),
        (["--layout", "fsdp", "--ranks", "4"], 3),
        (["--layout", "fsdp", "--ranks", "4", "--buddies"], 0),
        (["--layout", "fsdp", "--ranks", "4", "--buddies", "--buddy-distance", "4"], 2),
        ([], 2),
        (["--layout", "ddp"], 2),
        (["--layout", "hsdp=2"], 2),
        (["--layout", "hsdp=2x2", "--ranks", "5"], 2),
        (["--layout", "megatron:dp=4,instances=3"], 2),
        (["--layout", "megatron:xp=4"], 2),
        (["--layout", "other"], 2),
        (["--layout", "ddp", "--ranks", "4", "--lose", "4"], 2),
        (["--layout", "ddp", "--ranks", "4", "--lose", "one"], 2),
        (["--layout", "ddp", "--ranks", "4", "--bytes", "much"], 2),
        (["--layout", "ddp", "--ranks", "4", "--bandwidth", "0"], 2),
        (["nowhere"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("instep: ") if code == 2 else not shown.err
    if code != 2:
        assert main(["plan", "--json", *arguments]) == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] == (code == 0)
        assert answer["ranks"] == 4


def test_bandwidth_comes_from_the_incidents_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / layouts.FILE).write_text(described("ddp", 3).model_dump_json())
    receipt = {"phase": "restore_state", "plugin": "state_replica", "rank": 1, "seconds": 0.5, "bytes": 10**8, "verified": True}
    fault = {"kind": "exit", "ranks": [1], "detail": "", "detected_by": "agent", "at": 0.0}
    incident = {"incident": 1, "fault": fault, "attempts": [], "scope": "in_process", "step": 1, "steps_lost": 0, "phases": [receipt]}
    rest = {"seconds_to_resume": 1.0, "seconds_to_step": 1.0, "bytes_moved": 1, "verified": True}
    (tmp_path / "incidents.jsonl").write_text(json.dumps({**incident, **rest}) + "\n")
    assert main(["plan", str(tmp_path), "--lose", "1"]) == 0
    assert "5.00 s at 200.0 MB/s (measured)" in capsys.readouterr().out
