"""The rung below peers: when nobody holds a piece of state any more, all ranks go back to the newest checkpoint that can be loaded."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import xxhash

from instep import config
from instep.agent import events as ev
from instep.agent.agent import Launch, Outcome, run
from instep.agent.spawner import Server
from instep.messages import Injection
from instep.torch.digest import memory

pytestmark = pytest.mark.timeout(240)  # several jobs each, of which the first starts the fork server, on a machine that may be busy
JOB = Path(__file__).with_name("checkpoint_job.py")
EVERY, AT = 4, 10
NEWEST, OLDER = "step-0000000008", "step-0000000004"
RANKS = {"hsdp": 4, "ddp": 3, "own": 3}


@dataclass(frozen=True)
class Ran:
    """A finished job: how it ended, what its ranks told, and the lines of the console."""

    outcome: Outcome
    finals: list[dict[str, object]]
    lines: list[str] = field(default_factory=list)

    @property
    def states(self) -> list[dict[str, str]]:
        return [dict(final.get("state", {})) for final in self.finals]  # type: ignore[call-overload]

    @property
    def done(self) -> list[object]:
        return [final.get("done") for final in self.finals]


Train = Callable[..., Ran]


@pytest.fixture
def train(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs the job in a folder of its own, which keeps its checkpoints."""
    monkeypatch.chdir(tmp_path)

    def ran(
        kind: str, *, resume: bool = False, keep: int = 2, save: bool = True, kills: tuple[Injection, ...] = (), **orders: object
    ) -> Ran:
        lines: list[str] = []
        table = {"dir": "checkpoints", "every": EVERY, "keep": keep, "resume": resume}
        settings: Mapping[str, object] = {
            "plugins.init_gloo": True,
            "plugins.state_replica": {"checkpoint": table} if save else True,
            "limits.same_fault": 20,
        }
        for file in tmp_path.glob("final-*.json"):
            file.unlink()
        launch = Launch(
            script=str(JOB),
            args=(kind, json.dumps(orders)),
            nproc=RANKS[kind],
            config=config.load(overrides=settings, environ={}).config,
            injections=kills,
            log_dir=str(tmp_path / "logs"),
            quiet=True,
            on_event=lambda what: lines.append(what.text) if isinstance(what, ev.Log) else None,
        )
        outcome = run(launch, server=server)
        finals = [json.loads(p.read_text()) if (p := tmp_path / f"final-{r}.json").exists() else {} for r in range(RANKS[kind])]
        return Ran(outcome, finals, lines)

    return ran


def told(tmp_path: Path) -> str:
    """All that ranks wrote, for a message."""
    return "\n".join(log.read_text() for log in sorted((tmp_path / "logs").glob("rank-*.log")))


def read_by_torch(folder: Path) -> None:
    """A checkpoint is one that torch.distributed.checkpoint reads, every tensor of it."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(checkpoint, "HuggingFaceStorageReader"):
        return  # of an older torch
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(told.size, dtype=told.properties.dtype) for key, told in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group here
        checkpoint.load(state, storage_reader=reader, no_dist=True)
    receipts = [json.loads(json.loads(file.read_text())["receipt"]) for file in folder.glob("*.json")]
    assert set(state) == {key for receipt in receipts for key in receipt["digests"]}
    for receipt in receipts:
        for key, digest in receipt["digests"].items():
            assert xxhash.xxh3_64_hexdigest(memory(state[key])) == digest, key


def differing(one: Ran, other: Ran) -> list[str]:
    """Rank and name of each piece of state that differs, or is not there."""
    pairs = enumerate(zip(one.states, other.states, strict=True))
    return [f"rank {r} {n}" for r, (a, b) in pairs for n in [*a, *b] if a.get(n) != b.get(n)] + [
        f"rank {r}" for r, s in enumerate(one.states) if not s
    ]


@pytest.mark.parametrize(("kind", "kill"), [("hsdp", [1, 3]), ("ddp", [0, 1, 2])])
def test_the_rest_is_that_of_the_run_restarted_from_the_checkpoint(kind: str, kill: list[int], train: Train, tmp_path: Path) -> None:
    lost = train(kind, keep=10, kill=kill, at=AT, wait=NEWEST)
    assert lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    (incident,) = lost.outcome.incidents
    assert (incident.scope, incident.step, incident.steps_lost, incident.verified) == ("checkpoint", 8, 2, True)
    assert incident.bytes_moved > 0
    assert f"going on at step 8 from checkpoint {NEWEST}" in " ".join(lost.lines)
    for newer in Path("checkpoints").iterdir():
        if newer.name > NEWEST:
            shutil.rmtree(newer)
    read_by_torch(Path("checkpoints") / NEWEST)
    rest = train(kind, resume=True)
    assert rest.outcome.code == 0, rest.outcome.message + told(tmp_path)
    assert rest.done == [list(range(9, 15))] * RANKS[kind]
    assert differing(rest, lost) == []


@pytest.mark.parametrize(("harm", "why"), [("lose", "incomplete, without the parts of ranks [1]"), ("flip", "digests differ")])
def test_a_checkpoint_that_cannot_be_loaded_is_passed_over_by_name(harm: str, why: str, train: Train, tmp_path: Path) -> None:
    lost = train("ddp", kill=[0, 1, 2], at=AT, wait=NEWEST, harm={NEWEST: harm})
    assert lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    (incident,) = lost.outcome.incidents
    assert (incident.scope, incident.step, incident.steps_lost) == ("checkpoint", 4, 6)
    line = next(line for line in lost.lines if f"from checkpoint {OLDER}" in line)
    assert f"skipped: {NEWEST} is " in line
    assert why in line


@pytest.mark.full
@pytest.mark.parametrize(("harm", "why"), [("cut", "bytes"), ("blur", "the receipt of rank 0 cannot be read")])
def test_other_damage_is_passed_over_too(harm: str, why: str, train: Train, tmp_path: Path) -> None:
    test_a_checkpoint_that_cannot_be_loaded_is_passed_over_by_name(harm, why, train, tmp_path)


def test_one_that_was_damaged_is_as_good_as_any_once_it_is_saved_anew(train: Train, tmp_path: Path) -> None:
    """The survivors know of the damage of old; the checkpoint that bears its name now is another one."""
    lost = train("hsdp", kill=[1, 3], at=AT, wait=NEWEST, harm={NEWEST: "record"}, then={"kill": [1, 3], "at": 9, "wait": NEWEST})
    assert lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    first, second = lost.outcome.incidents
    assert (first.scope, first.step, first.steps_lost) == ("checkpoint", 4, 6)
    assert (second.scope, second.step, second.steps_lost) == ("checkpoint", 8, 1)


def test_none_left_ends_the_job_and_names_each(train: Train) -> None:
    lost = train("ddp", kill=[0, 1, 2], at=AT, wait=NEWEST, harm={NEWEST: "cut", OLDER: "lose"})
    assert lost.outcome.code == 70
    for part in ("no rank holds a complete step", f"{NEWEST} is damaged", f"{OLDER} is incomplete", "--max-restarts 0"):
        assert part in lost.outcome.message


def test_no_checkpoint_configured_names_the_shard_group_and_the_ranks(train: Train) -> None:
    lost = train("hsdp", save=False, kill=[1, 3], at=AT)
    assert lost.outcome.code == 70
    for part in ("shard group 'shards@1,3'", "no replica left among ranks [1, 3]", "checkpoint: none is configured"):
        assert part in lost.outcome.message


@pytest.mark.full
@pytest.mark.parametrize("point", ["connect", "restore", "mid_transfer", "verify"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_second_fault_while_the_checkpoint_is_loaded(point: str, rank: int, train: Train, tmp_path: Path) -> None:
    clean = train("hsdp")
    shutil.rmtree("checkpoints")
    again = Injection(id=1, rank=rank, kind="kill", step=None, point=point)
    lost = train("hsdp", kill=[1, 3], at=AT, wait=NEWEST, kills=(again,))
    assert lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    (incident,) = lost.outcome.incidents
    assert (incident.scope, incident.step, incident.steps_lost) == ("checkpoint", 8, 2)
    assert lost.outcome.fired == (1,)
    assert differing(clean, lost) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hsdp", "ddp"])
def test_the_rest_is_also_that_of_the_run_without_faults(kind: str, train: Train, tmp_path: Path) -> None:
    clean = train(kind)
    shutil.rmtree("checkpoints")
    lost = train(kind, kill=[1, 3] if kind == "hsdp" else [0, 1, 2], at=AT, wait=NEWEST)
    assert clean.outcome.code == lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    assert lost.outcome.incidents[0].scope == "checkpoint"
    assert differing(clean, lost) == []


def test_a_script_that_saves_by_itself_loads_what_all_ranks_have(train: Train, tmp_path: Path) -> None:
    lost = train("own", save=False, kill=[0, 1, 2], at=13)
    assert lost.outcome.code == 0, lost.outcome.message + told(tmp_path)
    (incident,) = lost.outcome.incidents
    # Saved at steps 0, 6 and 12; rank 1 does not see the last one.
    assert (incident.scope, incident.step, incident.steps_lost, incident.verified) == ("checkpoint", 6, 7, True)
    rest = train("own", save=False, start=6)
    assert rest.outcome.code == 0, rest.outcome.message + told(tmp_path)
    assert rest.done == [list(range(7, 15))] * 3
    assert differing(rest, lost) == []


def test_a_folder_of_another_run_is_not_written_to(train: Train) -> None:
    assert train("ddp").outcome.code == 0
    again = train("ddp")
    assert again.outcome.code == 2
    assert "checkpoint.resume = true" in again.outcome.message
    assert max(folder.name for folder in Path("checkpoints").iterdir()) == "step-0000000012"


def test_nothing_unfinished_is_left(train: Train) -> None:
    lost = train("ddp", kill=[1], at=AT)
    assert lost.outcome.code == 0
    assert lost.outcome.incidents[0].scope == "in_process"
    assert [file.name for file in Path("checkpoints").rglob("*.new")] == []
