"""``state_replica``: a lost rank's shard groups, each from its replicas, striped over all of them and verified."""

import socket
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field, PrivateAttr

from instep.errors import InstepError
from instep.hooks import Interruption, Job, Kept, Plugin, Recovery, hookimpl
from instep.model import AddressBook, Group, Json, Plan, Receipt, Role, Unrecoverable, Vote
from instep_state_replica.buddies import Buddies
from instep_state_replica.checkpoint import NAME, Checkpoint, Checkpoints
from instep_state_replica.checkpoint_plan import decide
from instep_state_replica.exchange import Limits
from instep_state_replica.sockets import Sockets, listen
from instep_state_replica.transfer import PORT, Transfer
from instep_state_replica.verify import agree


class StateReplica(Plugin):
    """Donors send to restoring ranks over sockets of their own; every stripe is digested, and all ranks compare in the end."""

    HOOK_API: ClassVar[int] = 1

    chunk_bytes: int = Field(default=1 << 18, ge=4096, description="bytes of one read or write")
    connect_timeout: float = Field(default=5.0, gt=0, description="seconds that connecting to a peer may take")
    digest_stripes: bool = Field(default=True, description="digest what is sent at both ends, on all ranks alike")
    buddies: bool = Field(default=False, description="keep copies of state that no other rank holds, here and on another rank")
    buddy_distance: int = Field(default=0, ge=0, description="ranks from a rank to its buddy; 0: the next rank on another machine")
    checkpoint: Checkpoint | None = Field(default=None, description="own checkpoints, for the day on which nobody holds the state")
    compare_digests: bool = Field(default=True, description="compare the replicas of each shard group after each recovery")

    _listener: socket.socket | None = PrivateAttr(default=None)
    _sockets: Sockets = PrivateAttr(default_factory=Sockets)
    _buddies: Buddies = PrivateAttr(default_factory=Buddies)
    _checkpoints: Checkpoints = PrivateAttr(default_factory=Checkpoints)

    @hookimpl
    def start(self, job: Job) -> Mapping[str, int]:
        """Open the listeners for transfers and for copies."""
        self._checkpoints.open(self.checkpoint, job)
        self._listener = listen(job.host)
        buddies = self._buddies.open(job, wanted=self.buddies, distance=self.buddy_distance, connect=self.connect_timeout)
        return {PORT: int(self._listener.getsockname()[1]), **buddies}

    @hookimpl
    def begin(self, recovery: Recovery) -> int | None:
        """Go on from a checkpoint of an earlier run."""
        return self._checkpoints.begin(recovery)

    @hookimpl
    def announce(self, groups: Sequence[Group]) -> Mapping[str, Json] | None:  # noqa: ARG002 - the same for all
        """Tell which checkpoints this rank cannot load."""
        return self._checkpoints.notes

    @hookimpl
    def committed(self, step: int) -> None:
        """Save a checkpoint when it is time to."""
        self._checkpoints.committed(step)

    @hookimpl(trylast=True)
    def plan(self, votes: Sequence[Vote]) -> Plan | Unrecoverable | None:
        """Core's plan, or the newest checkpoint if there is none. Other plugins decide first."""
        return decide(votes, self.checkpoint, plugin=NAME)

    @hookimpl
    def keep(self, step: int, book: AddressBook) -> Kept | None:
        """Copy all state of this rank, and have its buddy keep what no other rank holds."""
        return self._buddies.keep(step, book)

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """Cut transfers of older incarnations, and let no copy change any more."""
        self._sockets.shut_older(interruption.incarnation)
        self._buddies.quiesce(interruption.incarnation)
        self._checkpoints.interrupt()

    @hookimpl
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        """Donors send, restoring ranks receive, and all ranks align their gradient buckets. ``None`` if nobody has anything to send."""
        if recovery.plan.checkpoint:
            return self._checkpoints.restore(recovery)
        if all(role is Role.RESTORE for role in recovery.plan.roles) and not recovery.plan.copied:
            return None
        if self._listener is None:
            raise InstepError(f"{NAME}: start was not called; state is restored inside a job")
        began = time.monotonic()
        recovery.point("restore")
        limits = Limits(chunk=self.chunk_bytes, connect=self.connect_timeout, digest=self.digest_stripes)
        copied, shares = self._buddies.restore(recovery)
        received = copied + Transfer(recovery, shares, listener=self._listener, sockets=self._sockets, limits=limits).run()
        seconds = time.monotonic() - began
        verified = self.digest_stripes
        return Receipt(phase="restore_state", plugin=NAME, rank=recovery.rank, seconds=seconds, bytes=received, verified=verified)

    @hookimpl
    def verify(self, recovery: Recovery) -> Receipt | None:
        """Compare step and digest over all replicas of each shard group."""
        self._checkpoints.renew(recovery)
        if not self.compare_digests:
            return None
        began = time.monotonic()
        agree(recovery)
        return Receipt(phase="verify", plugin=NAME, rank=recovery.rank, seconds=time.monotonic() - began, verified=True)

    @hookimpl
    def close(self) -> None:
        """Close the listener."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._buddies.close()
        self._checkpoints.close()
