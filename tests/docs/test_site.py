"""The site builds without a warning, where its tools are installed: `make docs` installs them into .venv."""

import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT

pytest.importorskip("mkdocs", reason="the tools of the site are not installed; `make docs` installs them")
pytest.importorskip("mkdocstrings_handlers.python", reason="the tools of the site are not installed; `make docs` installs them")


@pytest.mark.timeout(180)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""})
    assert (built.returncode, built.stderr) == (0, ""), built.stdout + built.stderr
    hooks = (tmp_path / "site" / "reference" / "hooks" / "index.html").read_text()
    assert "<strong>If it raises</strong>" in hooks
    assert (tmp_path / "site" / "external-links.txt").read_text().startswith("https://")
