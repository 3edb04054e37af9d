"""Examples that have a plain twin: what recovery costs in lines, and that the pages about them show what stands in them."""

import difflib

import pytest

from .pages import DOCS, ROOT

MOST = {"fsdp": 15, "megatron": 15}
"""Lines that a script may have beside those of its twin; the three of Lightning and of NeMo are tested with their plugins."""
PAGES = {"fsdp": "sharded", "megatron": "megatron", "lightning": "lightning", "nemo": "nemo"}


def lines(name: str) -> list[str]:
    return (ROOT / "examples" / f"train_{name}.py").read_text().splitlines()


@pytest.mark.parametrize("name", MOST)
def test_lines(name: str) -> None:
    added = [line for line in difflib.ndiff(lines(f"{name}_plain"), lines(name)) if line.startswith("+ ")]

    assert 0 < len(added) <= MOST[name]


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str) -> None:
    """What the documentation shows stands in the example."""
    page = (DOCS / "how-to" / f"{PAGES[name]}.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()

    assert [line for line in shown if line.strip() not in ("", "...") and line not in lines(name)] == []
    assert shown
