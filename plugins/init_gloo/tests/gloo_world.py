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

import torch

from instep.errors import InstepError, Interrupted
from instep.hooks import CommsRequest, Communicator, Interruption, Job
from instep.model import Address, AddressBook, Fault, Group, Json
from instep_init_gloo.plugin import InitGloo

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch", "torch.distributed", "numpy", "instep_init_gloo.connect"])
PATIENCE = 30.0


class Peer:
    """One rank. Each public method is a command; what it returns goes back as JSON."""

    def __init__(self, rank: int, pipe: Connection, settings: dict[str, float]) -> None:
        self._rank, self._pipe = rank, pipe
        self._plugin = InitGloo(**settings)
        self._made: dict[str, Communicator] = {}
        self._stuck: dict[str, object] = {}

    def start(self, birth: int) -> Json:
        ports = self._plugin.start(Job(rank=self._rank, world_size=1, local_rank=0, birth=birth, host="127.0.0.1", secret=b""))
        return Address(rank=self._rank, birth=birth, host="127.0.0.1", ports=ports).model_dump(mode="json")

    def announce(self, groups: list[Json]) -> Json:
        return {"init_gloo": dict(self._plugin.announce([Group.model_validate(g) for g in groups]))}

    def connect(self, groups: list[Json], book: Json) -> Json:
        """Connect; any byte that arrives meanwhile is an interruption."""
        own = [Group.model_validate(g) for g in groups]
        parsed = AddressBook.model_validate(book)
        request = CommsRequest("gloo", self._rank, parsed.incarnation, own, parsed, self._check)
        before = time.monotonic()
        made = self._plugin.reinit_comms(request)
        assert made is not None
        self._made.update(zip((g.name for g in own), made, strict=True))
        return time.monotonic() - before

    def allreduce(self, name: str, count: int = 8) -> Json:
        tensor = torch.full((count,), float(self._rank + 1))
        self._made[name].group.allreduce([tensor]).wait()
        return float(tensor[0])

    def coalesced(self, name: str) -> Json:
        tensors = [torch.full((3,), float(self._rank + 1)), torch.full((2,), 1.0)]
        self._made[name].group.allreduce_coalesced(tensors).wait()
        return [float(t[0]) for t in tensors]

    def get_stuck(self, name: str, count: int = 8) -> Json:
        """Enter an all-reduce in a thread and leave it there."""

        def wait() -> None:
            try:
                self.allreduce(name, count)
                self._stuck["outcome"] = "done"
            except RuntimeError as error:
                self._stuck["outcome"] = type(error).__name__

        self._stuck = {"thread": threading.Thread(target=wait, daemon=True)}
        self._stuck["thread"].start()
        return None

    def outcome(self, seconds: float) -> Json:
        self._stuck["thread"].join(seconds)
        return self._stuck.get("outcome", "stuck")

    def quiesce(self, incarnation: int) -> Json:
        fault = Fault(kind="exit", ranks=(0,), detail="", detected_by="test", at=0.0)
        self._plugin.quiesce(Interruption(incarnation, fault, acknowledging=False))
        return None

    def drop(self) -> Json:
        """Drop all groups, as a graveyard does."""
        assert all(made.abandon()() for made in self._made.values())
        self._made.clear()
        self._stuck.clear()
        return None

    def census(self) -> Json:
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
        self._processes: list[BaseProcess | None] = [None] * size
        self._pipes: list[Connection | None] = [None] * size
        self._addresses: list[Json] = [None] * size
        for rank in range(size):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_peer, args=(rank, theirs, self._settings), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours
        self._births[rank] += 1
        self._addresses[rank] = self.ask(rank, "start", birth=self._births[rank])

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].join(PATIENCE)
        self._pipes[rank].close()

    def send(self, rank: int, op: str, **arguments: Json) -> None:
        self._pipes[rank].send_bytes(json.dumps({"op": op, **arguments}).encode())

    def receive(self, rank: int) -> dict[str, Json]:
        assert self._pipes[rank].poll(PATIENCE), f"rank {rank} does not answer"
        return json.loads(self._pipes[rank].recv_bytes())

    def ask(self, rank: int, op: str, **arguments: Json) -> Json:
        self.send(rank, op, **arguments)
        reply = self.receive(rank)
        assert "value" in reply, f"rank {rank}: {op}: {reply}"
        return reply["value"]

    def together(self, ranks: Sequence[int], op: str, **arguments: Json) -> list[Json]:
        """The same command on several ranks at once, as a collective needs it."""
        for rank in ranks:
            self.send(rank, op, **arguments)
        replies = [self.receive(rank) for rank in ranks]
        assert all("value" in reply for reply in replies), replies
        return [reply["value"] for reply in replies]

    def begin_connect(self, groups: Sequence[Group], ranks: Sequence[int] | None = None) -> dict[int, list[Json]]:
        """Announce ``groups`` on their members, and send the order to connect to ``ranks`` (all members unless given)."""
        self.incarnation += 1
        mine = {r: [g.model_dump(mode="json") for g in groups if r in g.ranks] for r in range(self.size)}
        notes = [self.ask(r, "announce", groups=mine[r]) if mine[r] and (ranks is None or r in ranks) else {} for r in range(self.size)]
        book = {"incarnation": self.incarnation, "addresses": self._addresses, "notes": notes}
        members = {r: own for r, own in mine.items() if own and (ranks is None or r in ranks)}
        for rank, own in members.items():
            self.send(rank, "connect", groups=own, book=book)
        return members

    def connect(self, *groups: Group) -> float:
        """Connect ``groups`` on all their members and prove it; the slowest member's seconds."""
        replies = {rank: self.receive(rank) for rank in self.begin_connect(groups)}
        assert all("value" in reply for reply in replies.values()), replies
        for group in groups:
            expected = float(sum(r + 1 for r in group.ranks))
            assert self.together(group.ranks, "allreduce", name=group.name) == [expected] * len(group.ranks)
        return max(float(reply["value"]) for reply in replies.values())

    def close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join(PATIENCE)


def group(name: str, *ranks: int) -> Group:
    """A gloo group."""
    return Group(name=name, ranks=ranks, backend="gloo")
