"""Thousands of seeded schedules against core's own decisions: nothing that must never happen does."""

import os
import subprocess
import sys

import pytest

from instep.commit import Commit
from instep.testing.simulator import Outcome, Schedule, Trouble, Violation, World, drawn, model, quiet
from instep.testing.simulator.campaign import campaign
from instep.testing.simulator.model import Reference
from tests.simulator.mutations import Mutation


def run(schedule: Schedule) -> Outcome:
    with quiet():
        return World(schedule).run()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_seeds() -> None:
    """200,000 are run by ``make sim``. Every kind of trouble must have happened, and most jobs must have come through whole."""
    tally = campaign(0, 10_000)
    assert not tally.failures, "\n".join(f"seed {seed}: {message}" for seed, message in tally.failures[:10])
    assert tally.seeds == tally.whole + tally.given_up == 10_000
    assert tally.whole > 7_500
    assert min(tally.kinds.values()) > 50
    assert len(tally.kinds) == 14


def test_without_trouble_the_run_is_the_reference() -> None:
    """The reference is computed without instep; each commit of the job is compared with it."""
    for world in (2, 3, 5):
        outcome = run(Schedule(seed=world, world=world, blocks=(2, 5), sums=2))
        assert (outcome.end.code, outcome.incidents, outcome.incarnations) == (0, 0, 0)


def test_the_reference_moves() -> None:
    """A reference that stood still would find every run right."""
    reference = Reference.of(3, 50, seed=1)
    assert len(set(reference.shared)) == 51
    assert len({value for row in reference.private for value in row}) == 153
    assert reference != Reference.of(3, 50, seed=2)


@pytest.mark.parametrize(
    "point", ["loader", "collective", "record", "slot", "prepared", "barrier", "body", "amid", "after", "step", "done"]
)
@pytest.mark.parametrize("kind", ["kill", "vanish", "raise", "stop"])
def test_one_trouble_at_each_point_of_a_step(kind: str, point: str) -> None:
    """In a block one trouble never ends a job, and costs one incident."""
    for seed in range(5):
        trouble = Trouble(kind, seed % 3, point=point, skip=int(point != "done"))  # type: ignore[arg-type]
        outcome = run(Schedule(seed=seed, blocks=(3,), troubles=(trouble,)))
        assert (outcome.end.code, outcome.incidents, len(outcome.happened)) == (0, 1, 1), (seed, outcome)


@pytest.mark.parametrize(
    "point", ["setup", "quiesce", "plan", "connect", "reinit_comms", "restore_state", "mid_transfer", "resume_data", "verify"]
)
def test_a_second_death_in_each_phase_of_the_recovery(point: str) -> None:
    """Of the replacement, or of a survivor, in the same incident."""
    happened = 0
    for seed in range(12):
        first = Trouble("kill", 0, point="barrier", skip=1)
        second = Trouble("kill", seed % 4, point=point, skip=1 if point == "setup" and seed % 4 == 0 else 0)
        outcome = run(Schedule(seed=seed, world=4, blocks=(3,), troubles=(first, second)))
        happened += len(outcome.happened) == 2
        assert outcome.end.code == 0 or any(where == "setup" for _, where in outcome.happened), (seed, outcome)
    assert happened >= 3


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Whatever the order of hashes: a seed that fails must fail again."""
    command = [sys.executable, "-m", "instep.testing.simulator", "--seed", "{}", "--trace"]
    lossy = next(seed for seed in range(100) if drawn(seed).lossy and len(drawn(seed).troubles) > 1)
    for seed in (lossy, 5):
        runs = {
            subprocess.run(
                [part.format(seed) for part in command],
                env={**os.environ, "PYTHONHASHSEED": hashes},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            ).stdout
            for hashes in ("1", "2")
        }
        assert len(runs) == 1


def ahead_of_a_cut_rank() -> None:
    """Rank 0 is cut in a barrier that rank 1 passes later, without the notice; rank 1's next record would take the slot of rank 0's step.

    Steps without a collective only. Rank 2 dies first, in the barrier, so that rank 0's step is the newest that is left.
    """
    for seed in range(120):
        for places in (9, 11, 13):
            first, then = Trouble("kill", 2, point="barrier", skip=1), Trouble("pause", 1, point="prepared", skip=1)
            troubles = (first, then, Trouble("kill", 1, after=places))
            assert run(Schedule(seed=seed, blocks=(4,), sums=0, pace=0.1, troubles=troubles)).end.code == 0


def test_no_record_is_overwritten_that_a_cut_rank_may_need() -> None:
    ahead_of_a_cut_rank()


def test_without_waiting_for_those_behind_one_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two slots; the third one is for going back a step to copies, and would hide it."""
    monkeypatch.setattr(model, "SLOTS", 2)
    careless = Mutation("waits for nobody", Commit, "_follow", (("s.world_size == 1 or", "True or"),))
    with careless.planted(), pytest.raises(Violation):
        ahead_of_a_cut_rank()
