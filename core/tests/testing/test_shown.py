"""Every hook is called by a contract, and shown at work by a plugin or an example of this clone."""

import ast
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from instep import discovery
from instep.hooks import HOOKS

ROOT = Path(__file__).parents[3]
CLASSES = sorted([*ROOT.glob("plugins/*/instep_*/plugin.py"), *ROOT.glob("examples/*/my_*/plugin.py")])


def implemented(file: Path) -> tuple[str, ...]:
    """The hooks in a plugin's source, as ``instep plugins`` reads them."""
    (name,) = (n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef))
    entry = EntryPoint(file.parent.name, f"{file.parent.name}.plugin:{name}", discovery.GROUP)
    shown = discovery.read_surface(discovery.Found(file.parent.name, file.parents[1].name, "0", entry))
    assert shown.why is None
    return shown.hooks


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_shown_at_work(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in CLASSES:
        monkeypatch.syspath_prepend(str(file.parents[1]))
    assert [file.parent.name for file in CLASSES if hook in implemented(file)]


def test_every_hook_is_called_in_the_pass_that_all_contracts_make() -> None:
    """Read from the source of the walk: each hook's name stands in a call of it."""
    tree = ast.parse((ROOT / "core" / "instep" / "testing" / "walk.py").read_text())
    (whole,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Walk")
    words = {node.value for node in ast.walk(whole) if isinstance(node, ast.Constant)}
    assert [hook for hook in HOOKS if hook not in words] == []


@pytest.mark.parametrize("file", CLASSES, ids=lambda file: file.parent.name)
def test_every_plugin_of_this_clone_is_under_a_contract(file: Path) -> None:
    tests = "\n".join(path.read_text() for path in (file.parents[1] / "tests").glob("test_*.py"))
    assert "Contract):" in tests
    (name,) = (n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef))
    assert f"plugin = {name}\n" in tests
