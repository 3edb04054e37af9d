"""A plugin for tests: in one phase of the first recovery it stops the agent or the fork server for a while."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Literal

import instep
from instep.hooks import CommsRequest, Interruption, Job, Recovery
from instep.model import Receipt


class Freezer(instep.Plugin):
    """Rank 0 acts, in ``start`` rank 1's second birth; once. The stopped process goes on after ``seconds``."""

    phase: Literal["start", "quiesce", "reinit_comms", "restore_state", "resume_data", "verify"]
    target: Literal["agent", "forkserver"]
    seconds: float = 1.5
    flag: str

    @instep.hookimpl
    def start(self, job: Job) -> None:
        """The replacement is being set up."""
        if job.rank == 1 and job.birth == 1:
            self._stop("start")

    @instep.hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """A fault was noticed."""
        if os.environ["RANK"] == "0":
            self._stop("quiesce")

    @instep.hookimpl(tryfirst=True)
    def reinit_comms(self, request: CommsRequest) -> None:
        """All ranks have acknowledged."""
        if request.rank == 0 and request.incarnation > 0:
            self._stop("reinit_comms")

    @instep.hookimpl(tryfirst=True)
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        """The communicators are up."""
        if recovery.rank == 0:
            self._stop("restore_state")
        return None

    @instep.hookimpl(tryfirst=True)
    def resume_data(self, recovery: Recovery) -> Receipt | None:
        """State was restored."""
        if recovery.rank == 0:
            self._stop("resume_data")
        return None

    @instep.hookimpl(tryfirst=True)
    def verify(self, recovery: Recovery) -> Receipt:
        """The last phase."""
        if recovery.rank == 0:
            self._stop("verify")
        return Receipt(phase="verify", plugin="freezer", rank=recovery.rank, seconds=0.0, verified=True)

    def _stop(self, phase: str) -> None:
        if phase != self.phase or Path(self.flag).exists():
            return
        Path(self.flag).write_text(phase)
        server = os.getppid()
        agent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
        pid = agent if self.target == "agent" else server
        wake = subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {pid}"], start_new_session=True)
        threading.Thread(target=wake.wait, daemon=True).start()
        os.kill(pid, signal.SIGSTOP)
