"""What a job is started with, and how it ended. The one place besides the configuration that looks at the environment."""

import json
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from instep.agent.channel import inherited
from instep.agent.events import Action, Event
from instep.agent.spawner import Warmth
from instep.agent.task import WARM, Task
from instep.config import Config
from instep.discovery import enabled, installed
from instep.messages import Injection
from instep.model import IncidentReport

_BLAS = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Launch:
    """A job to run on this machine: ``nproc`` ranks of ``script``, which is the name of a module if ``module`` is set.

    ``env`` is added to the environment of every rank, ``given`` (by plugins) only where nothing is set, ``warm`` is what the fork server
    imports if ``preload`` asks for one, ``quiet`` keeps everything off the console, ``hidden`` ranks are in their logs only, ``announce``
    says what is started, and ``on_event`` sees each event and action of the coordinator.
    """

    script: str
    module: bool = False
    args: Sequence[str] = ()
    nproc: int = 1
    config: Config = field(default_factory=Config)
    env: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    injections: Sequence[Injection] = ()
    report_dir: str | None = None
    log_dir: str | None = None
    master_port: int | None = None
    preload: bool = True
    warm: Sequence[str] = WARM
    quiet: bool = False
    hidden: Collection[int] = ()
    announce: bool = False
    on_event: Callable[[Event | Action], None] | None = None

    @property
    def headline(self) -> str:
        """What is started, in one line."""
        what = f"starting {'module ' if self.module else ''}{self.script} on {self.nproc} rank{'s' if self.nproc > 1 else ''}"
        names = ", ".join(enabled(self.config)) or "none"
        guard = f"plugins: {names}" if self.config.enabled else "nothing is protected (enabled = false)"
        kept = [f"{what} in {where}" for what, where in (("logs", self.log_dir), ("incidents", self.report_dir)) if where is not None]
        return "; ".join([what, guard, *kept])

    def environment(self) -> dict[str, str]:
        """What every process of the job gets: this process's environment, ``env``, and what plugins and torchrun set unless it is set."""
        base = inherited() | dict(self.env)
        if self.nproc > 1 and "OMP_NUM_THREADS" not in base:
            base["OMP_NUM_THREADS"] = "1"
        return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | dict(self.given) | base

    def server_environment(self) -> dict[str, str]:
        """The same for the fork server, where numpy's BLAS must not start threads: they do not survive a fork."""
        return {_BLAS: "1"} | self.environment()

    def task(self, rank: int, birth: int, *, restart: int, port: int) -> Task:
        """One birth of a rank, with torchrun's variables."""
        return Task(
            rank=rank,
            birth=birth,
            script=None if self.module else self.script,
            module=self.script if self.module else None,
            args=tuple(self.args),
            cwd=str(Path.cwd()),
            env=self.environment() | self._torchrun(rank, restart, port),
        )

    def _torchrun(self, rank: int, restart: int, port: int) -> dict[str, str]:
        numbers = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), self.nproc),
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": restart,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
        }
        words = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": f"instep-{os.getpid()}"}
        return {name: str(value) for name, value in numbers.items()} | words

    def warmth(self) -> Warmth:
        """What the fork server imports: torch, instep, the enabled plugins, and the configuration's ``preload``."""
        there = installed()
        plugins = [found.entry.module.partition(".")[0] + ".*" for name in enabled(self.config) for found in there.get(name, ())]
        folder = Path.cwd() if self.module else Path(self.script).resolve().parent
        table = json.dumps(dict(self.config.plugins)) if self.warm else ""
        return Warmth((*self.warm, *plugins, *self.config.preload), (str(folder),) if self.config.preload else (), table)

    def free_port(self) -> int:
        """A port for the script's own rendezvous, fresh at each start of the job unless one was asked for."""
        if self.master_port is not None:
            return self.master_port
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])


def gpus(*, dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that a script would see, told from device files and CUDA_VISIBLE_DEVICES: the agent never loads a CUDA library."""
    count = sum(1 for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return count
    names = [name.strip() for name in listed.split(",")]
    seen = takewhile(lambda name: int(name) < count if name.isdecimal() else name.startswith(("GPU-", "MIG-")), names)
    return len(list(seen)) if count else 0


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``fired`` are the ids of the injections that happened, ``steps`` those that all ranks have committed."""

    code: int
    message: str
    incidents: list[IncidentReport]
    fired: tuple[int, ...]
    steps: int
