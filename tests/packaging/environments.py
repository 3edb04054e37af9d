"""Fresh virtual environments that share heavy packages with the interpreter of the tests, so that torch is installed once."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
OURS = ("instep", "my_plugin", "my_restore", "_editable_impl_", "__editable__")
"""Beginnings of names in site-packages that belong to this clone."""


class Environment:
    """A virtual environment without pip of its own; ``paths`` are searched behind what is installed into it."""

    def __init__(self, directory: Path, paths: Sequence[str | Path]) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.site = next(directory.glob("lib/python3*/site-packages"))
        (self.site / "shared.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")

    def install(self, *what: str | Path, options: Sequence[str] = ()) -> None:
        """``pip install`` without an index and without build isolation."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--disable-pip-version-check"]
        words = [*command, "--no-index", "--no-build-isolation", *options, *map(str, what)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"pip install {what}:\n{done.stdout}\n{done.stderr}"

    def run(self, *words: str | Path, cwd: Path, code: int | None = 0, env: dict[str, str] | None = None) -> str:
        """Run the interpreter; its output and errors together."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV", "PYTHON", "INSTEP"))}
        done = subprocess.run(
            [self.python, *words], cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=PATIENCE
        )
        output = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"{words} ended with {done.returncode}:\n{output}"
        return output

    def ask(self, expression: str, *, cwd: Path, imports: str = "") -> object:
        """The value of an expression in this environment, through JSON."""
        names = f"import json, sys{', ' + imports if imports else ''}"
        return json.loads(self.run("-c", f"{names}\nprint(json.dumps({expression}))", cwd=cwd).splitlines()[-1])


def packages() -> list[Path]:
    """Where the interpreter of the tests finds installed packages."""
    here = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return sorted(path for path in here if path.is_dir())


def everything() -> list[Path]:
    """All packages, and those of this clone as they stand."""
    return [*packages(), ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def without(directory: Path, leave_out: Callable[[str], bool]) -> Path:
    """A folder of links to all installed packages but those of this clone and those that ``leave_out`` names."""
    directory.mkdir()
    for site in packages():
        for entry in site.iterdir():
            link = directory / entry.name
            if not entry.name.startswith(OURS) and entry.suffix != ".pth" and not leave_out(entry.name) and not link.exists():
                link.symlink_to(entry)
    return directory
