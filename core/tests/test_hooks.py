"""Every hook tells the same five things, is listed in the lifecycle, and takes only what a plugin can name."""

import inspect
import re

import pytest

from instep import hooks
from instep.hooks import HOOKS, Plugin

LINES = ("When: ", "Runs on: ", "Return: ", "Combine: ", "If it raises: ")


def specifications() -> dict[str, object]:
    return {name: f for name, f in vars(Plugin).items() if hasattr(f, "instep_spec")}


def test_hooks_lists_every_specification_once() -> None:
    assert sorted(specifications()) == sorted(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_docstring_begins_with_a_sentence_and_ends_with_the_five_lines(name: str) -> None:
    doc = inspect.getdoc(getattr(Plugin, name))
    assert doc is not None
    assert re.match(r"[A-Z][^\n]*\.(\n|$| )", doc)
    tail = doc.splitlines()[-len(LINES) :]
    assert [line[: len(start)] for line, start in zip(tail, LINES, strict=True)] == list(LINES)
    assert all(line.endswith(".") and len(line) > len(start) + 3 for line, start in zip(tail, LINES, strict=True))


@pytest.mark.parametrize("name", HOOKS)
def test_a_first_answer_hook_says_so(name: str) -> None:
    doc = inspect.getdoc(getattr(Plugin, name)) or ""
    first = getattr(Plugin, name).instep_spec["firstresult"]
    assert first == ("Combine: first answer" in doc)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_annotated_and_has_plain_arguments(name: str) -> None:
    signature = inspect.signature(getattr(Plugin, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in list(signature.parameters.values())[1:]:
        assert parameter.annotation is not inspect.Parameter.empty
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default is inspect.Parameter.empty


def test_the_picture_of_the_loop_shows_every_hook() -> None:
    picture = hooks.__doc__ or ""
    assert [name for name in HOOKS if not re.search(rf"^\s+{name}\(", picture, re.MULTILINE)] == []
