"""What a drill calls equal: the pure part of it."""

import json
from pathlib import Path

import pytest

from instep import drill
from instep.cli.drill import order, split
from instep.errors import UsageError


def trace(steps: dict[tuple[int, int], tuple[int, str]], states: list[dict[str, str]] | None = None) -> drill.Trace:
    return drill.Trace(steps, tuple([{"a": "1"}, {"a": "2"}] if states is None else states))


CLEAN = trace({(s, r): (3, f"{s}{r}") for s in range(3) for r in range(2)})


def test_equal_runs_have_no_difference() -> None:
    assert drill.compare(CLEAN, CLEAN) is None


def test_a_step_that_lacks_on_one_rank_is_no_difference() -> None:
    """Its rank died right behind the commit; the other rank's digest stands for it."""
    assert drill.compare(CLEAN, trace({key: value for key, value in CLEAN.steps.items() if key != (1, 0)})) is None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({**CLEAN.steps, (1, 1): (3, "x")}, (1, 1, "collectives")),
        ({**CLEAN.steps, (1, 1): (3, "x"), (0, 1): (3, "y")}, (0, 1, "collectives")),
        ({k: v for k, v in CLEAN.steps.items() if k[0] != 1}, (1, 0, "missing step")),
        ({**CLEAN.steps, (3, 0): (3, "30")}, (3, 0, "additional step")),
        ({**CLEAN.steps, (1, 1): (2, "x")}, (1, 1, "collectives")),
    ],
)
def test_the_first_difference_is_named(other: dict[tuple[int, int], tuple[int, str]], expected: tuple[int, int, str]) -> None:
    found = drill.compare(CLEAN, trace(other))
    assert found is not None
    assert (found.step, found.rank, found.name) == expected


def test_in_a_resumed_step_the_number_of_collectives_may_differ_but_not_their_content() -> None:
    fewer, changed = trace({**CLEAN.steps, (1, 1): (2, "x")}), trace({**CLEAN.steps, (1, 1): (3, "x")})
    assert drill.compare(CLEAN, fewer, resumed={1}) is None
    assert drill.compare(CLEAN, changed, resumed={1}) is not None


def test_states_are_compared_by_name() -> None:
    found = drill.compare(CLEAN, trace(dict(CLEAN.steps), [{"a": "1"}, {"a": "2", "b": "3"}]))
    assert found is not None
    assert (found.step, found.rank, found.name) == (3, 1, "b")


def test_a_rank_without_a_final_state_is_a_difference() -> None:
    assert drill.compare(trace(dict(CLEAN.steps), [{}, {}]), trace(dict(CLEAN.steps), [{}, {}])) is not None


def test_the_last_line_of_a_step_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    lines = [{"step": 0, "digest": "old", "collectives": 1}, {"step": 0, "digest": "new", "collectives": 1}]
    (tmp_path / "rank-0.steps.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 1, "dig')
    assert drill.read(tmp_path, 1).steps == {(0, 0): (1, "new")}


def test_the_selection_depends_on_the_seed_alone_and_fits_the_run() -> None:
    for steps in (1, 2, 3, 60):
        for seed in range(20):
            orders = drill.selection(steps=steps, ranks=3, seed=seed)
            assert orders == drill.selection(steps=steps, ranks=3, seed=seed)
            assert sorted(o.kind for o in orders) == ["hang", "kill", "raise"]
            drill.check(orders, steps=steps, ranks=3)


@pytest.mark.parametrize("text", ["2", "2@", "@3", "a@b", "2@3@4", "-1@2"])
def test_a_fault_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="RANK@STEP"):
        order("kill", text)


def test_options_end_where_the_script_begins() -> None:
    argv = ["--kill", "2@10", "0@20", "--json", "--hang", "3@40", "train.py", "--kill", "5@6", "x"]
    options, script = split(argv)
    assert options == ["--kill", "2@10", "--kill", "0@20", "--json", "--hang", "3@40"]
    assert script == ["train.py", "--kill", "5@6", "x"]
