"""``my_restore``: state is restored over a directory on local NVMe, and the newest copies are kept there."""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field, PrivateAttr

import instep
from instep.errors import InstepError
from instep.hooks import Job, Recovery, SharedState
from instep.model import IncidentReport, Plan, Receipt, Role, Status, Unrecoverable, Vote

NAME = "my_restore"
_POLL = 0.002


class MyRestore(instep.Plugin):
    """The first donor of a shard group writes it, replacements read: once over the disk, however many ranks are lost."""

    HOOK_API: ClassVar[int] = 1

    directory: str = Field(description="a directory on local NVMe that all ranks of the machine see")
    keep_copies: bool = Field(default=True, description="whether the newest copies stay behind the job")
    most: int = Field(default=64, ge=1, description="replacements that may read from the disk at once; with more, the next rung is quicker")

    _job: str = PrivateAttr(default="")
    _copies: list[Path] = PrivateAttr(default_factory=list)

    @instep.hookimpl
    def start(self, job: Job) -> None:
        """The name of the job's copies follows from its secret, which ranks of other jobs do not know."""
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        self._job = hashlib.sha256(job.secret).hexdigest()[:16]

    @instep.hookimpl
    def plan(self, votes: Sequence[Vote]) -> Plan | Unrecoverable | None:
        """In the agent. ``None`` leaves the plan to core; too many losses at once are not for this disk."""
        lost = [vote.rank for vote in votes if vote.status is Status.FRESH]
        if len(lost) <= self.most:
            return None
        why = f"{len(lost)} ranks were lost at once, {NAME} restores at most {self.most} from its disk (setting 'most')"
        return Unrecoverable(incarnation=votes[0].incarnation, why=why)

    @instep.hookimpl(tryfirst=True)
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        """``None`` only if no rank holds the state any more: the plan says so on every rank alike."""
        if all(role is Role.RESTORE for role in recovery.plan.roles):
            return None
        began, roles = time.monotonic(), recovery.plan.roles
        writing = [s for s in recovery.shards if recovery.rank == next(r for r in s.replicas if roles[r] is not Role.RESTORE)]
        older, self._copies = self._copies, [self._write(share, recovery) for share in writing]
        received = sum(self._read(share, recovery) for share in recovery.shards)
        # The donor must not go on, and take its copies away in the next recovery, before all have read them.
        recovery.gather(b"\1")
        for path in older:
            path.unlink(missing_ok=True)
        seconds = time.monotonic() - began
        return Receipt(phase="restore_state", plugin=NAME, rank=recovery.rank, seconds=seconds, bytes=received, verified=True)

    @instep.hookimpl
    def report(self, incident: IncidentReport) -> None:
        """In the agent. One line for each incident, so that a disk that grows slow is seen."""
        seconds = max((r.seconds for r in incident.phases if r.plugin == NAME), default=0.0)
        line = json.dumps({"incident": incident.incident, "bytes": incident.bytes_moved, "seconds": round(seconds, 3)})
        with (Path(self.directory) / "restores.jsonl").open("a") as file:
            file.write(line + "\n")

    @instep.hookimpl
    def close(self) -> None:
        """Leave the copies, or take them away."""
        if not self.keep_copies:
            for path in self._copies:
                path.unlink(missing_ok=True)

    def _path(self, share: SharedState, recovery: Recovery) -> Path:
        group = hashlib.sha256(share.name.encode()).hexdigest()[:16]
        return Path(self.directory) / f"{self._job}-{recovery.plan.incarnation}-{group}.state"

    def _write(self, share: SharedState, recovery: Recovery) -> Path:
        from my_restore import files

        path = self._path(share, recovery)
        files.write(path, *share.describe())
        return path

    def _read(self, share: SharedState, recovery: Recovery) -> int:
        from my_restore import files

        restoring = recovery.plan.roles[recovery.rank] is Role.RESTORE
        if not restoring and not share.layouts:
            return 0
        path, received = self._path(share, recovery), 0
        self._wait(path, recovery)
        schema = files.schema(path)
        if restoring:
            staged = not (recovery.fresh or recovery.torn)
            received = files.read(path, share.destination(schema, staged=staged))
            share.accept()
        if share.layouts:
            share.align(schema)
        return received

    def _wait(self, path: Path, recovery: Recovery) -> None:
        while not path.exists():
            recovery.check()
            if time.monotonic() > recovery.deadline:
                raise InstepError(f"{NAME}: {path} was not written in time; do all ranks see this directory, and is there room in it?")
            time.sleep(_POLL)
