"""The contracts find what they are there to find: each plugin of ``broken_plugins`` breaks one law, and hears of that one."""

from collections.abc import Callable, Sequence
from typing import Any

import broken_plugins
import pytest

from instep.errors import InstepError
from instep.hooks import HOOKS, Plugin
from instep.testing import CommsContract, DetectorContract, PluginContract, StateContract
from instep.testing.nursery import Nursery
from instep.testing.walk import DEADLINES

Law = Callable[..., None]


@pytest.fixture
def told(instep_nurseries: Callable[[Sequence[str]], Nursery]) -> Callable[..., str]:
    """The message with which a law of a contract fails for a plugin."""

    def tell(contract: type[PluginContract], plugin: type[Plugin], law: str, **attributes: object) -> str:
        made: Any = type("TestIt", (contract,), {"plugin": plugin, "settings": {}, **attributes})()
        made._nurseries = instep_nurseries
        with pytest.raises(pytest.fail.Exception) as caught:
            getattr(made, law)()
        return str(caught.value)

    return tell


@pytest.mark.parametrize(
    ("contract", "plugin", "law", "parts"),
    [
        (CommsContract, broken_plugins.Partial, "test_collectives_are_right", ["communicators for", "one for each group, in order"]),
        (CommsContract, broken_plugins.Greedy, "test_none_for_a_backend_of_somebody_else", ["must return None"]),
        (CommsContract, broken_plugins.Deaf, "test_quiesce_ends_what_waits_for_a_silent_rank", ["still going on (stuck)", "never unwinds"]),
        (
            StateContract,
            broken_plugins.Forgetful,
            "test_a_replacement_ends_with_its_donors_bytes",
            ["after rank 0 was restored, the ranks [0]"],
        ),
        (
            StateContract,
            broken_plugins.Blind,
            "test_verify_sees_one_wrong_value",
            ["passed on the ranks [0, 1, 2]", "rank 2 holds another value"],
        ),
        (
            StateContract,
            broken_plugins.Stubborn,
            "test_a_cut_attempt_gives_way_and_the_next_one_works",
            ["call recovery.check in every wait"],
        ),
        (DetectorContract, broken_plugins.Nervous, "test_a_healthy_rank_is_not_accused", ["though nothing had happened"]),
        (PluginContract, broken_plugins.Touchy, "test_any_legal_order_of_calls", ["RuntimeError: again", "The calls until then: start"]),
        (PluginContract, broken_plugins.Touchy, "test_loads_by_metadata", ["broken_plugins:Touchy", "[project.entry-points.instep]"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value if isinstance(value, str) else "",
)
def test_a_broken_law_is_told(
    told: Callable[..., str], contract: type[PluginContract], plugin: type[Plugin], law: str, parts: list[str]
) -> None:
    called = {"_name": "init_gloo"} if contract is CommsContract else {}
    message = told(contract, plugin, law, deadlines={"quiesce": 2.0, "restore_state": 3.0}, **called)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("law", "part"),
    [
        ("test_a_fault_that_comes_back_looks_the_same", "they must be equal and not empty"),
        ("test_a_repeated_step_is_judged_afresh", "still finds a fault after its cause went away"),
        ("test_a_provoked_fault_is_found_and_says_what_it_is", "must be the plugin's name"),
    ],
)
def test_a_detector_that_cries_wolf(told: Callable[..., str], law: str, part: str) -> None:
    assert part in told(DetectorContract, broken_plugins.Nervous, law, provoke=lambda self, plugin: None)


def test_a_class_that_other_processes_cannot_import_is_no_silent_pass(told: Callable[..., str]) -> None:
    class Local(broken_plugins.Base):
        """Known to this test alone."""

    with pytest.raises(InstepError, match="importable by name in another process"):
        told(PluginContract, Local, "test_hooks_answer_what_they_may")


def test_every_hook_has_a_deadline_and_is_called_in_a_contract() -> None:
    assert sorted(DEADLINES) == sorted(HOOKS)
