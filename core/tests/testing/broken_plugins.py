"""Commands for ranks of a test's world, and plugins with a mistake each; imported by name in the ranks' processes."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from instep.hooks import CommsRequest, Communicator, Interruption, Plugin, Recovery, hookimpl
from instep.model import Fault, Json, Receipt, Role
from instep.testing.peer import Rank
from instep_init_gloo.plugin import InitGloo
from instep_state_replica.plugin import StateReplica


def whoami(me: Rank) -> Json:
    return [me.rank, me.size, me.birth]


def shout(me: Rank) -> Json:
    return [row.decode() for row in me.gather(f"rank {me.rank}".encode())]


def fail(me: Rank) -> None:
    raise ValueError(f"rank {me.rank} fails")


def stand(me: Rank) -> None:
    threading.Event().wait()


def spin(me: Rank) -> None:
    while True:
        pass


def wait(me: Rank) -> None:
    while True:
        me.check()
        threading.Event().wait(0.005)


def map_shared_memory(me: Rank, path: str) -> Json:
    from instep.testing.census import Shm

    shm = Shm()
    Path(path).write_bytes(b"x" * 4096)
    other = Path(f"{path}-foreign")
    seen: Json = list(shm.left())
    Path(path).unlink()
    return [seen, list(shm.left()), other.exists()]


class Base(Plugin):
    HOOK_API: ClassVar[int] = 1


class Partial(InitGloo):
    """Forgets the last group of a request."""

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        made = super().reinit_comms(request)
        return made[:-1] if made is not None and len(made) > 1 else made


class Greedy(InitGloo):
    """Answers for every backend."""

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        made = super().reinit_comms(request)
        return [] if made is None else made


class Deaf(InitGloo):
    """Does nothing when told to be quiet."""

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        return None


class Forgetful(StateReplica):
    """Restores nothing."""

    @hookimpl
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        return Receipt(phase="restore_state", plugin="forgetful", rank=recovery.rank, seconds=0.0)


class Blind(StateReplica):
    """Finds every state equal."""

    @hookimpl
    def verify(self, recovery: Recovery) -> Receipt | None:
        return Receipt(phase="verify", plugin="blind", rank=recovery.rank, seconds=0.0, verified=True)


class Stubborn(StateReplica):
    """Waits for its donor without ever looking up."""

    @hookimpl
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        if recovery.plan.roles[recovery.rank] is Role.RESTORE and recovery.plan.incarnation == 1:
            threading.Event().wait()
        return super().restore_state(recovery)


class Nervous(Base):
    """Finds a fault in everything, each time under another name."""

    _seen: int = 0

    @hookimpl
    def detect(self) -> Fault | None:
        self._seen += 1
        return Fault(kind="exception", ranks=(0,), detail="odd", detected_by="somebody", at=1e-3, signature=f"odd:{self._seen}")


class Touchy(Base):
    """Cannot bear two faults without a commit in between."""

    _calm: bool = True

    @hookimpl
    def committed(self, step: int) -> None:
        self._calm = True

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        if not self._calm and interruption.incarnation % 2 == 0:
            raise RuntimeError("again")
        self._calm = False
