"""A world of real processes for tests: each rank a fork of one warm interpreter, told what to do by name."""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from instep.errors import InstepError
from instep.model import Json
from instep.testing.nursery import Nursery

PATIENCE = 60.0
"""Seconds that any command may take unless the caller says otherwise."""


_STACKS = 20.0
"""Seconds that a rank may take to write down where it stands."""
_STARVED = 4
_SLICE = 0.25


class _Deadline:
    """Seconds for a command; more, up to four times as many, while a rank has work to do and only lacks a processor."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._last = self._end + (_STARVED - 1) * seconds

    @property
    def left(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._end - time.monotonic())

    def extended(self, pids: Sequence[int]) -> bool:
        """The deadline has passed: whether it is put off, because one of these processes is not asleep."""
        now = time.monotonic()
        if now >= self._last or not any(map(_awake, pids)):
            return False
        self._end = min(now + _SLICE, self._last)
        return True


@dataclass(frozen=True)
class Answer:
    """What came of a command on one rank: a value, an error (type, text and place), or the place where it is still standing."""

    value: Json = None
    error: str = ""
    text: str = ""
    where: str = ""
    blocked: str = ""
    died: bool = False

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return not (self.error or self.blocked or self.died)

    def __str__(self) -> str:
        """How a message tells it."""
        if self.blocked:
            return f"has not returned; it stands at {self.blocked}"
        if self.died:
            return "ended its process"
        return f"raised {self.error}: {self.text} (at {self.where})" if self.error else f"returned {self.value!r}"


@dataclass
class _Peer:
    pid: int
    pidfd: int
    pipe: Connection
    stacks: IO[bytes]


class World:
    """``size`` ranks. ``plugin`` ("module:Class") and ``settings`` are what each of them holds; see ``instep.testing.peer``.

    A rank whose command does not return within its deadline is killed; ``replace`` gives it another birth.
    """

    def __init__(
        self, nursery: Nursery, size: int, *, plugin: str | None = None, name: str = "", settings: Mapping[str, Json] | None = None
    ) -> None:
        self.size = size
        self.births = [-1] * size
        self._nursery = nursery
        self._order: dict[str, Json] = {"plugin": plugin, "name": name, "settings": dict(settings or {})}
        self._peers: dict[int, _Peer] = {}
        for rank in range(size):
            self.replace(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def living(self) -> list[int]:
        """Ranks that have a process."""
        return sorted(self._peers)

    def replace(self, rank: int) -> None:
        """Another birth of a rank."""
        self.kill(rank)
        self.births[rank] += 1
        ours, theirs = Pipe()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        order = {**self._order, "rank": rank, "size": self.size, "birth": self.births[rank]}
        pid = self._nursery.fork(order, channel=theirs.fileno(), stacks=stacks.fileno())
        theirs.close()
        self._peers[rank] = _Peer(pid, os.pidfd_open(pid), ours, stacks)

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until it is gone."""
        if (peer := self._peers.pop(rank, None)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
            wait_for([peer.pidfd], PATIENCE)
            os.close(peer.pidfd)
            peer.pipe.close()
            peer.stacks.close()

    def stop(self, rank: int) -> None:
        """SIGSTOP: the rank says nothing any more."""
        signal.pidfd_send_signal(self._peers[rank].pidfd, signal.SIGSTOP)

    def do(self, rank: int, command: str, *, seconds: float = PATIENCE, **arguments: Json) -> Answer:
        """Run a command ("module:function") on one rank."""
        return self.together([rank], command, seconds=seconds, each=lambda _: arguments)[rank]

    def together(
        self,
        ranks: Sequence[int],
        command: str,
        *,
        seconds: float = PATIENCE,
        each: Callable[[int], Mapping[str, Json]] = lambda _: {},
        meanwhile: Callable[[], None] | None = None,
        **arguments: Json,
    ) -> dict[int, Answer]:
        """Run a command on several ranks at once. ``each`` adds arguments of one rank; ``meanwhile`` runs once all have been told."""
        for rank in ranks:
            self._send(rank, {"do": command, "with": {**arguments, **each(rank)}})
        if meanwhile is not None:
            meanwhile()
        return self._collect(ranks, _Deadline(seconds))

    def interrupt(self, *ranks: int) -> None:
        """A newer incarnation was opened: ``check`` and ``gather`` of a running command raise ``Interrupted``."""
        for rank in ranks:
            self._send(rank, {"interrupt": True})

    def close(self) -> None:
        """End all processes."""
        for rank in self.living:
            self.kill(rank)

    def _send(self, rank: int, message: Mapping[str, Json]) -> None:
        if rank not in self._peers:
            raise InstepError(f"rank {rank} of the test's world has no process; replace({rank}) gives it one")
        with suppress(ConnectionError):
            self._peers[rank].pipe.send_bytes(json.dumps(message).encode())

    def _collect(self, ranks: Sequence[int], deadline: "_Deadline") -> dict[int, Answer]:
        out: dict[int, Answer] = {}
        rows: dict[int, str] = {}
        waiting = {self._peers[rank].pipe: rank for rank in ranks}
        while waiting:
            asked = [pipe for pipe, rank in waiting.items() if rank not in rows]
            ready = wait_for(asked, deadline.left) if asked else []
            if asked and not ready:
                if deadline.extended([self._peers[rank].pid for rank in waiting.values()]):
                    continue
                return out | {rank: self._blocked(rank) for rank in waiting.values()}
            for pipe in ready:
                if not isinstance(pipe, Connection):
                    continue
                said = _hear(pipe)
                if said is not None and "gather" in said:
                    rows[waiting[pipe]] = str(said["gather"])
                else:
                    out[waiting.pop(pipe)] = Answer(died=True) if said is None else Answer(**said)  # type: ignore[arg-type]
            if rows and len(rows) == len(waiting):
                # A rank that left the command takes no part; the others wait for it until their deadline, as in a real job.
                if len(rows) == len(ranks):
                    for pipe in waiting:
                        pipe.send_bytes(json.dumps({"rows": [rows[rank] for rank in sorted(rows)]}).encode())
                else:
                    self.interrupt(*waiting.values())
                rows = {}
        return out

    def _blocked(self, rank: int) -> Answer:
        """Where a rank stands, told by its own stack; then it is killed."""
        peer = self._peers[rank]
        peer.stacks.truncate(0)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(peer.pidfd, signal.SIGCONT)
            signal.pidfd_send_signal(peer.pidfd, signal.SIGUSR1)
        end, text, before = time.monotonic() + _STACKS, "", "-"
        while time.monotonic() < end and (not text or text != before):
            time.sleep(0.05)
            peer.stacks.seek(0)
            before, text = text, peer.stacks.read().decode(errors="replace")
        self.kill(rank)
        return Answer(blocked=_place(text) or "an unknown place")


def _awake(pid: int) -> bool:
    """Whether a thread of the process runs, or would if a processor were free."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if task.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def _hear(pipe: Connection) -> dict[str, Json] | None:
    try:
        said: dict[str, Json] = json.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return None
    return said


def _place(stacks: str) -> str:
    """The innermost frame outside of this kit, the standard library and instep's plugin calls."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stacks)
    own, library = str(Path(__file__).parent), str(Path(os.__file__).parent)
    foreign = [f for f in frames if not f[0].startswith((own, "<")) and ("site-packages" in f[0] or not f[0].startswith(library))]
    foreign = [f for f in foreign if not f[0].endswith(("instep/plugins.py", "pluggy/_callers.py"))] or frames
    return f"{foreign[0][0]}:{foreign[0][1]}, in {foreign[0][2]}" if foreign else ""
