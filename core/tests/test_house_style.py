"""The rules of the house that no linter knows: sizes of files and functions, and where torch is imported."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "core" / "instep").rglob("*.py"), *ROOT.glob("plugins/*/instep_*/**/*.py")])
WORKER = {"block.py", "commit.py", "engine.py", "plain.py", "session.py"}
"""The worker's half of the core: imported by ``instep.init`` alone."""
MAX_FILE, MAX_FUNCTION, MAX_PLUGIN = 250, 40, 120


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Names of modules imported when the module itself is; what stands under ``if TYPE_CHECKING`` is not."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=ident)
def test_a_file_is_small_documented_and_speaks_of_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    limit = MAX_PLUGIN if path.name == "plugin.py" and "plugins" in path.parts else MAX_FILE
    assert lines <= limit, f"{lines} lines, the limit is {limit}: split it along a seam that has a name"
    tree = ast.parse(text)
    if path.name != "__init__.py" or tree.body:
        doc = ast.get_docstring(tree)
        assert doc, "no docstring"
        assert doc.split("\n\n", maxsplit=1)[0].rstrip().endswith((".", ":", "::")), "the first paragraph of the docstring is no sentence"
    long = [f"{f.name} {f.end_lineno - f.lineno + 1}" for f in functions(tree) if f.end_lineno and f.end_lineno - f.lineno >= MAX_FUNCTION]
    assert not long, f"functions above {MAX_FUNCTION} lines: {long}"


def needs_no_torch(path: Path) -> bool:
    core = ROOT / "core" / "instep"
    return core in path.parents and path.relative_to(core).parts[0] not in {"torch", "testing", *WORKER}


@pytest.mark.parametrize("path", [p for p in SOURCES if needs_no_torch(p)], ids=ident)
def test_agent_command_and_contracts_import_no_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [name for name in imports_at_top(tree) if name.partition(".")[0] == "torch" or name.startswith("instep.torch")] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "plugin.py" and "plugins" in p.parts], ids=ident)
def test_a_plugin_can_be_read_without_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [name for name in imports_at_top(tree) if name.partition(".")[0] == "torch"] == []
    assert len([node for node in tree.body if isinstance(node, ast.ClassDef)]) == 1


@pytest.mark.parametrize("path", SOURCES, ids=ident)
def test_any_stands_in_no_public_signature(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {id(inner) for f in functions(tree) for inner in ast.walk(f) if inner is not f}
    found = []
    for function in functions(tree):
        if function.name.startswith("_") or id(function) in hidden:
            continue
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        annotations = [a.annotation for a in every if a is not None] + [function.returns]
        if any(re.search(r"\bAny\b", ast.unparse(a)) for a in annotations if a is not None):
            found.append(function.name)
    assert not found, f"Any in the signature of {found}"
