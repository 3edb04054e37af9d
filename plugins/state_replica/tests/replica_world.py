"""Worlds of real processes, each a rank with the plugin and shared state of its own; the test plays the agent over pipes."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch import nn

from instep.errors import InstepError, Interrupted
from instep.hooks import Interruption, Job, Recovery
from instep.model import Address, AddressBook, Fault, Plan, Role
from instep.torch.shared import Shared
from instep_state_replica.plugin import StateReplica

SECRET = b"s" * 32
SECONDS = 20.0
FAULT = Fault(kind="exit", ranks=(0,), detail="", detected_by="test", at=0.0)


@dataclass(frozen=True)
class Orders:
    """What one rank is to do in one recovery.

    ``before`` is in seconds of sleep; at the point ``kill_at`` it dies; with ``tamper`` it changes its own state before it verifies.
    """

    plan: Plan
    fresh: bool = False
    torn: bool = False
    secret: bytes = SECRET
    seconds: float = SECONDS
    kill_at: str = ""
    before: float = 0.0
    tamper: bool = False


@dataclass
class Outcome:
    """What came of it: an error's type and text, or receipts; the digest of the state at the end; seconds; the points passed."""

    error: str = ""
    digest: int = 0
    seconds: float = 0.0
    received: int = 0
    verified: list[bool] = field(default_factory=list)
    points: list[str] = field(default_factory=list)


class State:
    """A model and an optimizer after some steps."""

    def __init__(self, steps: int, width: int) -> None:
        torch.manual_seed(steps)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3, dtype=torch.float32))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.info = {"steps": steps}
        for _ in range(steps):
            self.model(torch.randn(2, width)).sum().backward()
            self.optimizer.step()
        self.shared = Shared()
        for name in ("model", "optimizer", "info"):
            self.shared.add(name, getattr(self, name))
        self.shared.check_coverage()


class Worker:
    """The main loop of a rank."""

    def __init__(self, rank: int, size: int, pipe: Connection, settings: Mapping[str, int]) -> None:
        torch.set_num_threads(1)
        self.rank, self.pipe = rank, pipe
        self.plugin = StateReplica(**settings)
        job = Job(rank=rank, world_size=size, local_rank=rank, birth=0, host="127.0.0.1", secret=SECRET)
        pipe.send(dict(self.plugin.start(job)))
        self.state = State(0, 4)

    def run(self) -> None:
        with suppress(EOFError):
            while True:
                command, *rest = self.pipe.recv()
                if command == "state":
                    self.state = State(*rest)
                    self.pipe.send(self.state.shared.digest())
                elif command == "recover":
                    self.pipe.send(self.recover(*rest))
                elif command == "end":
                    self.plugin.close()
                    return

    def recover(self, orders: Orders) -> Outcome:
        out = Outcome()
        time.sleep(orders.before)
        began = time.monotonic()
        recovery = Recovery(
            plan=orders.plan,
            rank=self.rank,
            fresh=orders.fresh,
            torn=orders.torn,
            secret=orders.secret,
            state=self.state.shared,
            check=self.check,
            gather=self.gather,
            point=lambda name: self.point(name, orders, out),
            deadline=began + orders.seconds,
        )
        try:
            receipt = self.plugin.restore_state(recovery)
            assert receipt is not None
            out.received, out.verified = receipt.bytes, [receipt.verified]
            if orders.tamper:
                next(self.state.model.parameters()).data.view(-1)[0] += 1
            receipt = self.plugin.verify(recovery)
            out.verified.append(receipt is not None and receipt.verified)
        except (InstepError, Interrupted) as error:
            out.error = f"{type(error).__name__}: {error}"
        out.seconds = time.monotonic() - began
        out.digest = self.state.shared.digest()
        return out

    def point(self, name: str, orders: Orders, out: Outcome) -> None:
        out.points.append(name)
        if name == orders.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def check(self) -> None:
        if self.pipe.poll():
            command, incarnation = self.pipe.recv()
            assert command == "interrupt"
            interruption = Interruption(incarnation=incarnation, fault=FAULT, acknowledging=False)
            thread = threading.Thread(target=self.plugin.quiesce, args=(interruption,))
            thread.start()
            thread.join()
            raise Interrupted

    def gather(self, data: bytes) -> Sequence[bytes]:
        self.pipe.send(data)
        rows: Sequence[bytes] | None = self.pipe.recv()
        if rows is None:
            raise Interrupted
        return rows


def _main(rank: int, size: int, pipe: Connection, settings: Mapping[str, int]) -> None:
    Worker(rank, size, pipe, settings).run()


class World:
    """All ranks, seen from the test."""

    def __init__(self, size: int, **settings: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "torch._dynamo"])
        self._settings = settings
        self.pipes: list[Connection] = []
        self._workers = [self._birth(rank) for rank in range(size)]
        self.ports = [self._receive(rank)["peer"] for rank in range(size)]  # type: ignore[index]
        self.incarnation = 0

    def _birth(self, rank: int) -> "multiprocessing.process.BaseProcess":
        ours, theirs = self._context.Pipe()
        worker = self._context.Process(target=_main, args=(rank, self.size, theirs, self._settings), daemon=True)
        worker.start()
        theirs.close()
        self.pipes.insert(rank, ours)
        return worker

    def replace(self, rank: int) -> None:
        """A new birth for a rank that was killed."""
        self._workers[rank].join(5)
        self.pipes.pop(rank).close()
        self._workers[rank] = self._birth(rank)
        self.ports[rank] = self._receive(rank)["peer"]  # type: ignore[index]

    def _receive(self, rank: int) -> object:
        if not self.pipes[rank].poll(SECONDS + 10):
            raise TimeoutError(f"rank {rank} says nothing")
        return self.pipes[rank].recv()

    def state(self, rank: int, steps: int, *, width: int = 64) -> int:
        """Give a rank the state after some steps; returns its digest."""
        self.pipes[rank].send(("state", steps, width))
        digest = self._receive(rank)
        assert isinstance(digest, int)
        return digest

    def plan(self, *restoring: int, ports: Mapping[int, int] | None = None) -> Plan:
        """The next plan, in which the ``restoring`` ranks draw from all others."""
        self.incarnation += 1
        roles = tuple(Role.RESTORE if rank in restoring else Role.KEEP for rank in range(self.size))
        donors = tuple(rank for rank in range(self.size) if rank not in restoring) if restoring else ()
        actual = {**dict(enumerate(self.ports)), **(ports or {})}
        addresses = tuple(Address(rank=r, birth=0, host="127.0.0.1", ports={"peer": actual[r]}) for r in range(self.size))
        book = AddressBook(incarnation=self.incarnation, addresses=addresses)
        return Plan(incarnation=self.incarnation, block=0, step=7, roles=roles, donors={"replica": donors}, book=book)

    def recover(self, orders: Mapping[int, Orders], *, interrupt_after: float | None = None) -> dict[int, Outcome]:
        """Run a recovery on the given ranks; the outcome of each that lived to tell."""
        for rank, each in orders.items():
            self.pipes[rank].send(("recover", each))
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            for rank in orders:
                with suppress(OSError):
                    self.pipes[rank].send(("interrupt", self.incarnation + 1))
        out: dict[int, Outcome] = {}
        rows: dict[int, bytes] = {}
        waiting = set(orders)
        while waiting:
            for rank in sorted(waiting - rows.keys()):
                try:
                    said = self._receive(rank)
                except (EOFError, ConnectionError):
                    waiting.discard(rank)
                    continue
                if isinstance(said, Outcome):
                    out[rank] = said
                    waiting.discard(rank)
                elif isinstance(said, bytes):
                    rows[rank] = said
            # All who can are in the gather; it fails if somebody never comes.
            answer = [rows[r] for r in sorted(rows)] if len(rows) == len(orders) else None
            for rank in rows:
                self.pipes[rank].send(answer)
            rows = {}
        return out

    def close(self) -> None:
        """End all processes."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(("end",))
        for worker in self._workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self.pipes:
            pipe.close()


class Damage:
    """A proxy in front of a port that flips one bit of what its server says."""

    def __init__(self, port: int, at: int) -> None:
        self._target, self._at = port, at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, self._at), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, at: int | None) -> None:
        passed = 0
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if at is not None and passed <= at < passed + len(data):
                    data[at - passed] ^= 1
                passed += len(data)
                target.sendall(data)
