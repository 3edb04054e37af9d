"""Processes by an identity that no other process can take over: boot, pid namespace, pid and start time."""

import os
import select
import signal
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from instep.agent.channel import Environment

_STATE, _START = 0, 19
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Identity:
    """One process. ``started`` counts clock ticks since the machine's boot."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The identity of a living process, ``None`` if there is none of that number."""
        stat = _stat(pid)
        return cls(*_here(), pid, int(stat[_START])) if stat is not None and stat[_STATE] not in "ZX" else None

    @classmethod
    def me(cls) -> Self:
        """This process."""
        own = cls.of(os.getpid())
        assert own is not None
        return own

    @classmethod
    def parse(cls, tree: object) -> Self | None:
        """The identity in a JSON object that ``plain`` made, ``None`` if there is none."""
        match tree:
            case {"boot": str(boot), "namespace": str(namespace), "pid": int(pid), "started": int(started)}:
                return cls(boot, namespace, pid, started)
        return None

    def plain(self) -> dict[str, object]:
        """As a JSON object."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether it certainly may still run; a process in another pid namespace of this machine counts as alive."""
        boot, namespace = _here()
        if self.boot != boot:
            return False
        return self.namespace != namespace or self.of(self.pid) == self

    def open(self) -> int | None:
        """A pidfd for it, ``None`` when it is dead or cannot be watched from here."""
        if _here() != (self.boot, self.namespace):
            return None
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return None
        if self.of(self.pid) == self:
            return pidfd
        os.close(pidfd)
        return None


def end(identity: Identity, signum: signal.Signals, *, seconds: float) -> bool:
    """Signal a process and wait for its end up to ``seconds``; whether it is gone."""
    pidfd = identity.open()
    if pidfd is None:
        return True
    try:
        signal.pidfd_send_signal(pidfd, signum)
        return bool(select.select([pidfd], [], [], seconds)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)


def agent() -> Identity | None:
    """The agent of this job, ``None`` without one: whoever made the other end of this worker's control socket."""
    channel = Environment.read().channel
    if channel is None:
        return None
    try:
        with socket.socket(fileno=os.dup(channel.control)) as sock:
            pid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    except OSError:
        return None
    return Identity.of(pid) if pid != os.getpid() else None


def _here() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
