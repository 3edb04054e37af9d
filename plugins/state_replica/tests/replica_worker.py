"""A process of a test's world: a rank with the plugin, and with shard groups of its own."""

import os
import signal
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from instep.errors import InstepError, Interrupted
from instep.hooks import Interruption, Job, Recovery
from instep.model import Fault, Plan
from instep.torch.shared import Shared
from instep_state_replica.plugin import StateReplica

SECRET = b"s" * 32
SECONDS = 20.0
FAULT = Fault(kind="exit", ranks=(0,), detail="", detected_by="test", at=0.0)
Digests = tuple[tuple[str, int], ...]
"""The digest of each shard group of a rank, by name."""


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
    """What came of it: an error's type and text, or receipts; the state's digests at the end; seconds; the points passed."""

    error: str = ""
    digest: Digests = ()
    seconds: float = 0.0
    received: int = 0
    verified: list[bool] = field(default_factory=list)
    points: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spec:
    """A shard group: its replicas, whether all of them align, and the model in it.

    ``layers``: names in the order of building, each of ``width`` by ``width``, the last ``out`` wide. ``optimized``: the order in which
    the optimizer gets them, unless it is the same. ``schedule``: whether there is one more protected object.
    """

    name: str
    replicas: tuple[int, ...]
    layouts: bool = True
    width: int = 64
    dtype: str = "float32"
    layers: tuple[str, ...] = ("first", "second")
    out: int = 3
    optimized: tuple[str, ...] = ()
    schedule: bool = False


class Held:
    """``hooks.SharedState`` of a model and an optimizer after some steps. Groups of other names have other values."""

    def __init__(self, spec: Spec, steps: int) -> None:
        torch.manual_seed(steps + zlib.crc32(spec.name.encode()))
        self.name, self.replicas, self.layouts = spec.name, spec.replicas, spec.layouts
        dtype = getattr(torch, spec.dtype)
        widths = [spec.width] * (len(spec.layers) - 1) + [spec.out]
        self.model = nn.ModuleDict({k: nn.Linear(spec.width, w, dtype=dtype) for k, w in zip(spec.layers, widths, strict=True)})
        self.optimizer = torch.optim.AdamW(p for k in spec.optimized or spec.layers for p in self.model[k].parameters())
        for _ in range(steps):
            value = torch.randn(2, spec.width, dtype=dtype)
            for layer in self.model.values():
                value = layer(value)
            value.sum().backward()
            self.optimizer.step()
        shared = Shared()
        for name, obj in (("model", self.model), ("optimizer", self.optimizer), ("info", {"steps": steps})):
            shared.add(name, obj)
        if spec.schedule:
            shared.add("schedule", torch.optim.lr_scheduler.StepLR(self.optimizer, 1))
        shared.check_coverage()
        (self._share,) = shared.shares()
        self.describe, self.destination, self.accept = self._share.describe, self._share.destination, self._share.accept
        self.present = self._share.present
        self.align, self.digest = self._share.align, self._share.digest

    def tamper(self) -> None:
        """Change one value."""
        tensor: Tensor = next(self.model.parameters()).data
        tensor.view(-1)[0] += 1


class Worker:
    """The main loop of a rank."""

    def __init__(self, rank: int, size: int, pipe: Connection, settings: Mapping[str, int]) -> None:
        torch.set_num_threads(1)
        self.rank, self.pipe = rank, pipe
        self.plugin = StateReplica(**settings)
        job = Job(rank=rank, world_size=size, local_rank=rank, birth=0, host="127.0.0.1", secret=SECRET)
        pipe.send(dict(self.plugin.start(job)))
        self.held: list[Held] = []

    def run(self) -> None:
        with suppress(EOFError):
            while True:
                command, *rest = self.pipe.recv()
                if command == "state":
                    specs, steps = rest
                    self.held = [Held(spec, steps) for spec in specs]
                    self.pipe.send(self.digest())
                elif command == "tamper":
                    next(held for held in self.held if held.name == rest[0]).tamper()
                    self.pipe.send(self.digest())
                elif command == "recover":
                    self.pipe.send(self.recover(*rest))
                elif command == "end":
                    self.plugin.close()
                    return

    def digest(self) -> Digests:
        return tuple(sorted((held.name, held.digest()) for held in self.held))

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
            shards=self.held,
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
                self.held[0].tamper()
            receipt = self.plugin.verify(recovery)
            out.verified.append(receipt is not None and receipt.verified)
        except (InstepError, Interrupted) as error:
            out.error = f"{type(error).__name__}: {error}"
        out.seconds = time.monotonic() - began
        out.digest = self.digest()
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


def main(rank: int, size: int, pipe: Connection, settings: Mapping[str, int]) -> None:
    """The process."""
    Worker(rank, size, pipe, settings).run()
