"""Real processes that use the plugin by itself: each obeys one command at a time, sent as JSON over a pipe."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from instep.errors import InstepError, Interrupted
from instep.hooks import CommsRequest, Communicator, Interruption, Job
from instep.model import Address, AddressBook, Fault, Group
from instep_init_gloo.plugin import InitGloo

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch", "torch.distributed", "numpy", "instep_init_gloo.connect"])
PATIENCE = 30.0
Wire = Any
"""Whatever JSON holds."""


class Peer:
    """One rank. Each public method is a command; what it returns goes back as JSON."""

    def __init__(self, rank: int, pipe: Connection, settings: dict[str, float]) -> None:
        self._rank, self._pipe = rank, pipe
        self._plugin = InitGloo(**settings)
        self._made: dict[str, Communicator] = {}
        self._stuck = threading.Thread()
        self._outcome = "stuck"

    def start(self, birth: int) -> Wire:
        ports = self._plugin.start(Job(rank=self._rank, world_size=1, local_rank=0, birth=birth, host="127.0.0.1", secret=b""))
        return Address(rank=self._rank, birth=birth, host="127.0.0.1", ports=ports).model_dump(mode="json")

    def announce(self, groups: list[Wire]) -> Wire:
        return {"init_gloo": dict(self._plugin.announce([Group.model_validate(g) for g in groups]))}

    def connect(self, groups: list[Wire], book: Wire) -> Wire:
        """Connect; any byte that arrives meanwhile is an interruption."""
        own = [Group.model_validate(g) for g in groups]
        parsed = AddressBook.model_validate(book)
        request = CommsRequest("gloo", self._rank, parsed.incarnation, own, parsed, self._check)
        before = time.monotonic()
        made = self._plugin.reinit_comms(request)
        assert made is not None
        self._made.update(zip((g.name for g in own), made, strict=True))
        return time.monotonic() - before

    def allreduce(self, name: str, count: int = 8) -> Wire:
        tensor = torch.full((count,), float(self._rank + 1))
        self._made[name].group.allreduce([tensor]).wait()
        return float(tensor[0])

    def coalesced(self, name: str) -> Wire:
        tensors = [torch.full((3,), float(self._rank + 1)), torch.full((2,), 1.0)]
        self._made[name].group.allreduce_coalesced(tensors).wait()
        return [float(t[0]) for t in tensors]

    def get_stuck(self, name: str, count: int = 8) -> Wire:
        """Enter an all-reduce in a thread and leave it there."""

        def wait() -> None:
            try:
                self.allreduce(name, count)
                self._outcome = "done"
            except RuntimeError as error:
                self._outcome = type(error).__name__

        self._outcome = "stuck"
        self._stuck = threading.Thread(target=wait, daemon=True)
        self._stuck.start()
        return None

    def outcome(self, seconds: float) -> Wire:
        self._stuck.join(seconds)
        return self._outcome

    def quiesce(self, incarnation: int) -> Wire:
        fault = Fault(kind="exit", ranks=(0,), detail="", detected_by="test", at=0.0)
        self._plugin.quiesce(Interruption(incarnation, fault, acknowledging=False))
        return None

    def drop(self) -> Wire:
        """Drop all groups, as a graveyard does."""
        assert all(made.abandon()() for made in self._made.values())
        self._made.clear()
        return None

    def census(self) -> Wire:
        """Number of descriptors and threads, and the ports listened on."""
        listening = []
        with open("/proc/self/net/tcp") as table:
            for row in list(table)[1:]:
                fields = row.split()
                if fields[3] == "0A":
                    listening.append((fields[9], int(fields[1].split(":")[1], 16)))
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        own = sorted(port for inode, port in listening if f"socket:[{inode}]" in names)
        return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "listening": own}

    def serve(self) -> None:
        while True:
            command = json.loads(self._pipe.recv_bytes())
            try:
                reply = {"value": getattr(self, command.pop("op"))(**command)}
            except (InstepError, Interrupted, RuntimeError) as error:
                reply = {"error": type(error).__name__, "text": str(error)}
            self._pipe.send_bytes(json.dumps(reply).encode())

    def _check(self) -> None:
        if self._pipe.poll():
            self._pipe.recv_bytes()
            raise Interrupted


def run_peer(rank: int, pipe: Connection, settings: dict[str, float]) -> None:
    """Entry point of a peer process; ends when its pipe does."""
    torch.set_num_threads(1)
    try:
        Peer(rank, pipe, settings).serve()
    except EOFError:
        os._exit(0)


class World:
    """The ranks of a test, and what an agent would do for them: gather addresses and notes, send out books."""

    def __init__(self, size: int, **settings: float) -> None:
        self.size = size
        self.incarnation = -1
        self._settings = settings
        self._births = [-1] * size
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self.addresses: list[Wire] = [None] * size
        for rank in range(size):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_peer, args=(rank, theirs, self._settings), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours
        self._births[rank] += 1
        self.addresses[rank] = self.ask(rank, "start", birth=self._births[rank])

    def signal(self, rank: int, number: int) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].join(PATIENCE)
        self._pipes[rank].close()

    def send(self, rank: int, op: str, **arguments: Wire) -> None:
        self._pipes[rank].send_bytes(json.dumps({"op": op, **arguments}).encode())

    def receive(self, rank: int) -> dict[str, Wire]:
        assert self._pipes[rank].poll(PATIENCE), f"rank {rank} does not answer"
        reply: dict[str, Wire] = json.loads(self._pipes[rank].recv_bytes())
        return reply

    def ask(self, rank: int, op: str, **arguments: Wire) -> Wire:
        self.send(rank, op, **arguments)
        reply = self.receive(rank)
        assert "value" in reply, f"rank {rank}: {op}: {reply}"
        return reply["value"]

    def together(self, ranks: Sequence[int], op: str, **arguments: Wire) -> list[Wire]:
        """The same command on several ranks at once, as a collective needs it."""
        for rank in ranks:
            self.send(rank, op, **arguments)
        replies = [self.receive(rank) for rank in ranks]
        assert all("value" in reply for reply in replies), replies
        return [reply["value"] for reply in replies]

    def announce(self, groups: Sequence[Group], ranks: Sequence[int]) -> tuple[dict[int, list[Wire]], Wire]:
        """What each of ``ranks`` is to connect, and the book of the next incarnation with what they announced."""
        self.incarnation += 1
        mine = {r: [g.model_dump(mode="json") for g in groups if r in g.ranks] for r in ranks}
        notes = [self.ask(r, "announce", groups=mine[r]) if mine.get(r) else {} for r in range(self.size)]
        return {r: own for r, own in mine.items() if own}, {"incarnation": self.incarnation, "addresses": self.addresses, "notes": notes}

    def begin_connect(self, groups: Sequence[Group], ranks: Sequence[int] | None = None) -> list[int]:
        """Announce ``groups`` and order ``ranks`` (all unless given) to connect; the ranks that were ordered."""
        members, book = self.announce(groups, range(self.size) if ranks is None else ranks)
        for rank, own in members.items():
            self.send(rank, "connect", groups=own, book=book)
        return list(members)

    def connect(self, *groups: Group) -> float:
        """Connect ``groups`` on all their members and prove it; the slowest member's seconds."""
        replies = [self.receive(rank) for rank in self.begin_connect(groups)]
        assert all("value" in reply for reply in replies), replies
        for group in groups:
            expected = float(sum(r + 1 for r in group.ranks))
            assert self.together(group.ranks, "allreduce", name=group.name) == [expected] * len(group.ranks)
        return max(float(reply["value"]) for reply in replies)

    def close(self) -> None:
        for rank, process in self._processes.items():
            self._pipes[rank].close()
            process.kill()
            process.join(PATIENCE)


def group(name: str, *ranks: int) -> Group:
    """A gloo group."""
    return Group(name=name, ranks=ranks, backend="gloo")
