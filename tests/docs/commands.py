"""Holds a command line of the documentation against the program that would run it, without running it."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from instep import config
from instep.cli import drill, run, torchrun
from instep.cli.main import COMMANDS

from .pages import ROOT

_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")


class WrongError(AssertionError):
    """A command line that cannot work."""


def check(line: str, *, files: Sequence[str] = ()) -> None:
    """Hold one line against its program. ``files`` are the files that the page has the reader write, or make.

    Raises:
        WrongError: the program is none that is known here, or something that the line names does not exist.
        SystemExit: the program's own parser refuses the line.
        InstepError: instep refuses it, or a variable before it.
    """
    words = shlex.split(line, comments=True)
    environment: dict[str, str] = {}
    while words and (match := _VARIABLE.fullmatch(words[0])):
        environment[match[1]] = match[2]
        del words[0]
    if any(not name.startswith("INSTEP_") for name in environment):
        raise WrongError(f"{line}: this variable is none of instep's")
    config.load(environ=environment)
    if not words or words[0] not in PROGRAMS:
        raise WrongError(f"{line}: no check for this program; teach it to tests/docs/commands.py")
    PROGRAMS[words[0]](words[1:], files)


def _exists(name: str, files: Sequence[str]) -> None:
    if name not in files and not (ROOT / name).exists():
        raise WrongError(f"{name} does not exist in the clone, and the page does not have it written")


def _instep(words: Sequence[str], files: Sequence[str]) -> None:
    name, *rest = words
    if name not in COMMANDS:
        raise WrongError(f"there is no command {name!r}")
    if name == "run":
        _run(rest, files)
    elif name == "drill":
        options, script = drill.split(rest)
        args = drill.parser().parse_args(options)
        for kind in ("kill", "raise", "hang"):
            for text in getattr(args, kind):
                drill.order(kind, text)
        _exists(script[0], files)
    else:
        import_module(COMMANDS[name].target.partition(":")[0]).parser().parse_args(rest)


def _run(words: Sequence[str], files: Sequence[str]) -> None:
    known = run.parser()
    args = known.parse_args(torchrun.dashes(words, known))
    torchrun.check(args)
    run.count(args.nproc_per_node, flag="--nproc-per-node")
    _exists(args.script[0], files)


def _make(words: Sequence[str], _: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in words:
        if "=" not in word and word not in targets:
            raise WrongError(f"the Makefile has no target {word!r}")


def _pip(words: Sequence[str], files: Sequence[str]) -> None:
    if words[0] != "install":
        raise WrongError(f"pip {words[0]}")
    extras = re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    for word in words[1:]:
        if match := re.fullmatch(r"instep\[([a-z-]+)\]", word):
            if match[1] not in extras:
                raise WrongError(f"instep has no extra {match[1]!r}")
        elif word != "-e":
            _exists(word.removeprefix("./"), files)


def _python(words: Sequence[str], files: Sequence[str]) -> None:
    if words[0] != "-m":
        _exists(words[0], files)
    elif find_spec(words[1]) is None:
        raise WrongError(f"there is no module {words[1]}")


def _paths(words: Sequence[str], files: Sequence[str]) -> None:
    for word in words:
        _exists(word, files)


def _activate(words: Sequence[str], _: Sequence[str]) -> None:
    if list(words) != [".venv/bin/activate"]:
        raise WrongError(f"`make venv` makes no {' '.join(words)}")


def _kill(words: Sequence[str], _: Sequence[str]) -> None:
    if not re.fullmatch(r"-9 \d+", " ".join(words)):
        raise WrongError("kill -9 and a number")


PROGRAMS: Mapping[str, Callable[[Sequence[str], Sequence[str]], None]] = {
    "instep": _instep,
    "torchrun": _run,
    "make": _make,
    "pip": _pip,
    "pytest": _paths,
    "python": _python,
    ".": _activate,
    "kill": _kill,
}
