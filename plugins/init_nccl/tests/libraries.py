"""The real NCCL libraries, from build/nccl/VERSION/libnccl.so.2, each loaded into a process of its own."""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(__file__).parents[3] / "build" / "nccl"
PATIENCE = 30.0
NAMES = ("ncclCommInitRankScalable", "ncclCommRevoke", "ncclCommShrink", "ncclCommAbort")
_SETTLED = 10.0


def found() -> list[Path]:
    """The libraries that were fetched, oldest first."""
    return sorted(FOLDER.glob("*/libnccl.so.2"), key=lambda path: [int(part) for part in path.parent.name.split(".")])


class Nccl:
    """A process that holds one library: it makes ids with their root threads, and tells how many threads and descriptors it has."""

    def __init__(self, path: Path, variables: Mapping[str, str] | None = None) -> None:
        self.path = path
        chosen = {"NCCL_SOCKET_IFNAME": "lo", **(variables or {})}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept | chosen, text=True
        )
        self.version = int(self.ask("version"))
        self.head = 20 if self.version >= 22900 else 16

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, what: str) -> Any:
        """One question, one answer in JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def unique_id(self) -> bytes:
        """What ``ncclGetUniqueId`` gives, with its root thread behind it."""
        return bytes.fromhex(self.ask("id"))

    def holdings(self, *, settle: tuple[int, int] | None = None) -> tuple[int, int]:
        """Threads and descriptors; waits until they are no more than ``settle``."""
        until = time.monotonic() + _SETTLED
        while True:
            threads, files = self.ask("holdings")
            if settle is None or (threads <= settle[0] and files <= settle[1]) or time.monotonic() > until:
                return threads, files
            time.sleep(0.02)


def _serve(path: str) -> None:
    library = ctypes.CDLL(path)
    for line in sys.stdin:
        what = line.strip()
        if what == "version":
            version = ctypes.c_int()
            assert library.ncclGetVersion(ctypes.byref(version)) == 0
            answer: Any = version.value
        elif what == "id":
            raw = ctypes.create_string_buffer(128)
            assert library.ncclGetUniqueId(raw) == 0
            answer = raw.raw.hex()
        elif what == "names":
            answer = [name for name in NAMES if hasattr(library, name)]
        else:
            answer = [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
