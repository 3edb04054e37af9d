"""Runs small jobs without torch under the real agent, in this process or as ``instep run``."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from instep import config
from instep.agent import events as ev
from instep.agent.agent import Launch, Outcome, Server, run

FAKE = str(Path(__file__).with_name("fake_worker.py"))
NO_PLUGINS = {"plugins.init_gloo": False, "plugins.state_replica": False}


def soon() -> float:
    """A second, on a machine that has a processor to spare for what is to be seen."""
    return 1.0 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 5.0


def launch(script: str, *args: str, nproc: int = 3, settings: dict[str, object] | None = None, **fields: object) -> Launch:
    """A quiet job without plugins whose fork server imports nothing."""
    resolved = config.load(overrides={**NO_PLUGINS, "watchdog.stall": 0.5, **(settings or {})}, environ={})
    base = Launch(script=script, args=args, nproc=nproc, config=resolved.config, warm=(), quiet=True)
    return replace(base, **fields)  # type: ignore[arg-type]


@dataclass
class Story:
    """What happened in a job: its outcome, and each event and action with its time."""

    outcome: Outcome
    events: list[tuple[float, object]] = field(default_factory=list)

    def times(self, kind: type) -> list[float]:
        return [at for at, what in self.events if isinstance(what, kind)]


def play(job: Launch, server: Server | None = None, act: Callable[[object], None] | None = None) -> Story:
    """Run a job to its end; ``act`` sees each event."""
    events: list[tuple[float, object]] = []

    def seen(what: ev.Event | ev.Action) -> None:
        events.append((time.monotonic(), what))
        if act is not None:
            act(what)

    return Story(run(replace(job, on_event=seen), server=server), events)


class Cli:
    """``instep run`` as a process of its own, in a group of its own."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        (folder / "instep.toml").write_text("[plugins]\ninit_gloo = false\nstate_replica = false\n[watchdog]\nstall = 1.0\n")
        command = [sys.executable, "-c", _WARMLESS, *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)

    def end(self, seconds: float = 30.0) -> tuple[int, str, str]:
        """Wait for the end; exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


_WARMLESS = """
import sys
from dataclasses import replace
from instep.agent import agent
whole = agent.run
agent.run = lambda launch: whole(replace(launch, warm=()))
from instep.cli.main import main
sys.exit(main(["run", *sys.argv[1:]]))
"""


def until(condition: Callable[[], object], seconds: float = 20.0, what: str = "") -> None:
    """Wait for a condition, and fail loudly when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.01)


def alive(pids: Iterable[int]) -> list[int]:
    """Those processes that exist and are no zombies."""
    out = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            out.append(pid)
    return out


def descendants(pid: int) -> list[int]:
    """All processes below one, of all threads."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found
