"""Fetches real NCCL libraries for the tests into build/nccl/VERSION: ``python fetch.py nvidia-nccl-cu12==2.27.5 nvidia-nccl-cu13``."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from libraries import FOLDER

LIBRARY = "nvidia/nccl/lib/libnccl.so.2"


def fetch(requirement: str) -> Path:
    """Download one wheel, about 300 MB, and keep its library; nothing is installed, and nothing done for a version that is there."""
    _, pinned, version = requirement.partition("==")
    kept = FOLDER / version / "libnccl.so.2"
    if pinned and kept.exists():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*words, "--dest", folder, requirement], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        kept = FOLDER / wheel.name.split("-")[1] / "libnccl.so.2"
        kept.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(LIBRARY, folder)).replace(kept.with_suffix(".part"))
        kept.with_suffix(".part").replace(kept)
    return kept


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(fetch(wanted))
