"""What the agent asks of a new worker process, and the order of the file descriptors that go with it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

WARM = (
    *("torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed", "torch.optim"),
    *("torch.utils.data", "torch.utils.data.distributed", "numpy", "pydantic"),
    *("instep.messages", "instep.plugins", "instep.codec.*", "instep.session", "instep.lifecycle", "instep.torch.*"),
)
"""What the fork server imports before the first worker (``.*``: with all submodules); whichever is not installed is left out."""


@dataclass(frozen=True)
class Task:
    """One birth of a rank: what to run, in which environment, and as whom. Exactly one of ``script`` and ``module`` is set."""

    rank: int
    birth: int
    script: str | None
    module: str | None
    args: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]

    @property
    def name(self) -> str:
        """How the process is called in ps and top."""
        return f"instep-rank-{self.rank}"

    def seal(self) -> int:
        """The task in an anonymous memory file; the caller owns the file descriptor."""
        fd = os.memfd_create("instep-task", os.MFD_CLOEXEC)
        os.write(fd, json.dumps(asdict(self)).encode())
        return fd


def unseal(fd: int) -> Task:
    """Read a task, and close its file."""
    raw = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    os.close(fd)
    return Task(**{**raw, "args": tuple(raw["args"])})


class Fds(NamedTuple):
    """File descriptors of a worker, in the order in which they are passed."""

    task: int
    control: int
    record: int
    setup: int
    page: int
    even: int
    odd: int
    log: int

    @property
    def kept(self) -> tuple[int, ...]:
        """Those that the worker's session uses, in the order of ``channel.Channel``."""
        return self[1:-1]
