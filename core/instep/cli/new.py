"""``instep new NAME``: writes a plugin distribution that installs, loads and passes its contract at once."""

import argparse
import json
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import instep
from instep.compat import version
from instep.discovery import installed
from instep.errors import UsageError
from instep.hooks import HOOK_API

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SUFFIX = ".template"


def parser() -> argparse.ArgumentParser:
    """The options of ``instep new``."""
    out = argparse.ArgumentParser(
        prog="instep new", description="Write a plugin distribution that installs, loads and passes its contract."
    )
    out.add_argument("name", metavar="NAME", help="the plugin's name: a Python name in small letters, as in my_detector")
    out.add_argument("--directory", metavar="DIR", default=".", help="where to make the folder NAME (default: here)")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def main(argv: Sequence[str]) -> int:
    """Write the project; 2 if the name is no good or the folder exists."""
    args = parser().parse_args(argv)
    check(args.name)
    root = Path(args.directory) / args.name
    if root.exists():
        raise UsageError(f"{root} exists already; choose another name, or another --directory")
    written = write(args.name, root)
    if args.json:
        print(json.dumps({"name": args.name, "directory": str(root), "files": written}))
    else:
        print(
            f"{root}: {len(written)} files. Now type:\n\n  pip install {_shell(root)}\n  pytest {root}\n\nThen read {root / 'README.md'}."
        )
    return 0


def check(name: str) -> None:
    """Raises ``UsageError`` for a name that cannot be a plugin's."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(f"'{name}' cannot be the name of a plugin: small letters, digits and _ only, as in my_detector")
    if name in sys.stdlib_module_names or name in {"instep", "tests", "torch"}:
        raise UsageError(f"'{name}' is the name of another Python module; choose another one")
    if claims := installed().get(name):
        raise UsageError(f"{claims[0]} is installed already; choose another name")


def write(name: str, root: Path) -> list[str]:
    """Fill the template in; the files written, relative to ``root``."""
    major, minor = version(instep.__version__)
    words = {
        "name": name,
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "distribution": name.replace("_", "-"),
        "hook_api": str(HOOK_API),
        "instep": f"{major}.{minor}",
        "next": f"{major}.{minor + 1}",
    }
    template = files("instep.cli") / "template"
    return sorted(_copy(template, root, root, words))


def _copy(source: Traversable, target: Path, root: Path, words: dict[str, str]) -> list[str]:
    written: list[str] = []
    target.mkdir(parents=True)
    for item in source.iterdir():
        if item.is_dir():
            written += _copy(item, target / (words["name"] if item.name == "package" else item.name), root, words)
        elif item.name.endswith(_SUFFIX):
            file = target / item.name.removesuffix(_SUFFIX)
            file.write_text(_fill(item.read_text(encoding="utf-8"), words), encoding="utf-8")
            written.append(str(file.relative_to(root)))
    return written


def _fill(text: str, words: dict[str, str]) -> str:
    """Replace ``{{word}}``. A word that is not known is a fault of the template."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], text)


def _shell(path: Path) -> str:
    text = str(path)
    return text if path.is_absolute() or text.startswith(".") else f"./{text}"
