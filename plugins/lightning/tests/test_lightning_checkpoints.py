"""Ranks that hold the last copies of some state die together: the training goes on from what ModelCheckpoint saved, as Lightning would."""

import pytest
from light_harness import Ended, Runs

from instep.testing.finals import differing

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


def lines(ended: Ended) -> list[tuple[int, dict[str, str]]]:
    """What was logged, with its step."""
    return [(int(row["step"]), {key: value for key, value in row.items() if value != ""}) for row in ended.logged]


def as_restarted(lost: Ended, rest: Ended, clean: Ended, *, died: int) -> None:
    """The job that lost state ends as the one that Lightning restarts, and has logged each line once."""
    assert rest.run.outcome.code == 0, rest.run.log(0)[-3000:]
    assert not (differs := differing(rest.finals, lost.finals)), differs
    logged = lines(lost)
    assert [(step, sorted(row)) for step, row in logged] == [(step, sorted(row)) for step, row in lines(clean)]
    assert [row for step, row in logged if step < died] == [row for step, row in lines(clean) if step < died]
    again = [row for step, row in lines(rest) if step >= died]
    assert [row for step, row in logged if step >= died] == again
    assert again


@pytest.mark.parametrize(
    ("save", "shape", "ranks"),
    [
        (8, (), 3),
        pytest.param(6, (), 3, marks=pytest.mark.full),
        pytest.param(8, ("--scaled",), 3, marks=pytest.mark.full),
        pytest.param(8, ("--mode", "manual"), 3, marks=pytest.mark.full),
        pytest.param(20, (), 1, marks=pytest.mark.full),
    ],
)
def test_the_rest_is_that_of_the_run_that_lightning_restarts(save: int, shape: tuple[str, ...], ranks: int, runs: Runs) -> None:
    """At the end of an epoch of 8 steps, and in the middle of one: Lightning begins its data anew there, and so does instep."""
    args, died = ("--save", str(save * (2 if "manual" in shape else 1)), *shape), save * 5 // 2
    clean, lost = runs.clean(*args, ranks=ranks), runs.run(*args, "--die", str(died), ranks=ranks)
    assert lost.run.outcome.code == 0, f"{lost.run.outcome.message}\n{lost.run.log(0)[-3000:]}"
    (incident,) = lost.run.incidents
    newest = died // save * save
    assert (incident.scope, incident.step, incident.steps_lost, incident.verified) == ("checkpoint", newest, died - newest, True)
    (saved,) = [path for path in clean.saved if int(path.stem) == newest * (2 if "manual" in shape else 1)]
    for plain in ([], ["--plain"]):
        as_restarted(lost, runs.run(*args, "--resume", str(saved), *plain, ranks=ranks), clean, died=died)


@pytest.mark.full
@pytest.mark.parametrize("form", ["--whole", "--parts"])
def test_fully_shard(form: str, runs: Runs) -> None:
    """Both replicas of a shard are lost at once."""
    shape = ["--mode", "fsdp", "--epochs", "2", "--save", "12", *([form] if form == "--whole" else [])]
    clean, lost = runs.clean(*shape, ranks=4), runs.run(*shape, "--die", "14", "--lost", "1,3", ranks=4)
    assert lost.run.outcome.code == 0, f"{lost.run.outcome.message}\n{lost.run.log(0)[-3000:]}"
    (incident,) = lost.run.incidents
    assert (incident.scope, incident.step, incident.steps_lost, incident.verified) == ("checkpoint", 12, 2, True)
    rest = runs.run(*shape, "--resume", str(clean.out / "checkpoints" / "12.ckpt"), ranks=4)
    as_restarted(lost, rest, clean, died=14)


def test_what_cannot_be_loaded_is_passed_over_by_name(runs: Runs) -> None:
    lost = runs.run("--save", "6", "--die", "20", "--harm", "flip", "unpickle")
    assert lost.run.outcome.code == 0, f"{lost.run.outcome.message}\n{lost.run.log(0)[-3000:]}"
    (incident,) = lost.run.incidents
    assert (incident.scope, incident.step, incident.steps_lost) == ("checkpoint", 6, 14)
    log = lost.run.log(0)
    assert "checkpoints/18.ckpt is damaged" in log
    assert "checkpoints/12.ckpt would have to be unpickled: it holds pathlib.PosixPath" in log


def test_none_left_ends_the_job_and_names_each(runs: Runs) -> None:
    lost = runs.run("--save", "6", "--die", "13", "--harm", "cut", "unpickle")
    assert lost.run.outcome.code == 70
    for part in (
        "no rank holds a complete step",
        "12.ckpt is damaged or incomplete",
        "6.ckpt would have to be unpickled",
        "--max-restarts",
    ):
        assert part in lost.run.outcome.message
