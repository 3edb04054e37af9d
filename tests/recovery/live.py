"""A job under `instep run` in a process of its own, for tests that kill, stop or inspect the agent."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.recovery import processes
from tests.recovery.harness import JOB


@dataclass
class Live:
    """A running job, its agent and the directory it writes to."""

    agent: "subprocess.Popen[str]"
    out: Path
    ranks: int
    temporary: Path
    """Where the job's temporary files would be."""

    def steps(self, rank: int) -> list[dict[str, int]]:
        """What the rank has written after each step so far; works with ``--stats``."""
        path = self.out / f"stats-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def reach(self, step: int, *, seconds: float = 30.0) -> None:
        """Wait until every rank has committed ``step`` steps."""

        def reached() -> bool:
            assert self.agent.poll() is None, f"the job ended early with code {self.agent.returncode}:\n{self.output()}"
            return all(any(line["step"] >= step for line in self.steps(rank)) for rank in range(self.ranks))

        processes.wait_for(reached, seconds=seconds, what=f"step {step}")

    def workers(self) -> dict[int, int]:
        """Process id of each rank, by the name it gives itself."""
        names = {pid: processes.command(pid) for pid in processes.descendants(self.agent.pid)}
        return {int(name.rpartition("-")[2]): pid for pid, name in sorted(names.items(), reverse=True) if name.startswith("instep-rank-")}

    def forkserver(self) -> int:
        """Process id of the fork server: the parent of rank 0."""
        pid = processes.parent(self.workers()[0])
        assert pid is not None
        return pid

    def incidents(self) -> list[dict[str, object]]:
        """The reports of incidents so far."""
        path = self.out / "report" / "incidents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def output(self) -> str:
        """All that agent and workers printed so far."""
        return (self.out / "output").read_text()


@contextmanager
def live(
    out: Path, *, ranks: int = 3, args: Sequence[str] = (), options: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Iterator[Live]:
    """Start the test job; whatever is left of it at the end is killed."""
    out.mkdir(parents=True)
    temporary = Path(tempfile.mkdtemp(prefix="live-"))  # short: sockets in it have names of 107 bytes at most
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        **{"INSTEP_" + k.upper().replace(".", "__"): str(v) for k, v in (settings or {}).items()},
    }
    command = [sys.executable, "-m", "instep", "run", "--nproc-per-node", str(ranks), "--report-dir", str(out / "report"), *options]
    command += [str(JOB), "--out", str(out), "--stats", *args]
    with (out / "output").open("w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield Live(agent, out, ranks, temporary)
    finally:
        everyone = {agent.pid} | processes.descendants(agent.pid)
        processes.end(everyone)
        agent.wait(10)
        shutil.rmtree(temporary, ignore_errors=True)
