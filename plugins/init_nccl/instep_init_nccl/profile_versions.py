"""Which versions are installed, told without importing any of them: metadata, files, and libnccl in a process of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NamedTuple

from instep_init_nccl.machine import Machine

NCCL = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64", "/opt/nccl/lib")
CUDA = "/usr/local/cuda/version.json"
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
_ASK = "import ctypes,sys; n = ctypes.c_int(); assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(n)) == 0; print(n.value)"
_SECONDS = 20.0


class Installed(NamedTuple):
    """A version, ``None`` if there is none or it cannot be told, and where that is known from."""

    version: str | None
    source: str


def numbers(text: str) -> tuple[int, ...]:
    """The release of a version, for comparison: ``2.6.0rc0+cu129`` is (2, 6, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def package(*names: str) -> Installed:
    """The version of the first of some distributions that is installed."""
    for name in names:
        try:
            return Installed(version(name), f"metadata of {name}")
        except PackageNotFoundError:
            continue
    return Installed(None, f"metadata of {', '.join(names)}")


def torch_cuda() -> str | None:
    """The CUDA that torch was built with, read from its version.py; ``None`` for a build without."""
    text = _file_of("torch", "torch/version.py")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text or "", re.MULTILINE)
    return match[1] if match else None


def cuda(machine: Machine) -> Installed:
    """The CUDA toolkit of the machine, else the runtime that torch brought, else what torch was built with."""
    told = machine.text(CUDA)
    if told and (match := re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', told)):
        return Installed(match[1], CUDA)
    runtime = package(*_RUNTIMES)
    if runtime.version is not None:
        return runtime
    return Installed(torch_cuda(), "torch/version.py")


def nccl(machine: Machine) -> Installed:
    """The NCCL that torch would load: its wheel's, else the first on the library path. The library itself is asked, in a child process."""
    tried = []
    for path in _libraries(machine):
        if (told := ask_nccl(path)) is not None:
            return Installed(told, str(path))
        tried.append(str(path))
    wheel = package(*_WHEELS)
    return wheel if wheel.version else Installed(None, ", ".join(tried) or "libnccl.so.2 is nowhere")


def ask_nccl(path: Path) -> str | None:
    """The version that a libnccl tells; ``None`` if it cannot be loaded here."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, str(path)], capture_output=True, text=True, timeout=_SECONDS, check=True, env={"PATH": ""}
        )
        code = int(json.loads(asked.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


def _libraries(machine: Machine) -> Iterator[Path]:
    for name in _WHEELS:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        yield from (Path(str(file.locate())) for file in files if file.name == "libnccl.so.2")
    found = machine.first(NCCL, "libnccl.so.2")
    if found is not None:
        yield machine.real(found)


def _file_of(name: str, path: str) -> str | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return found.read_text(f"../{path}")
