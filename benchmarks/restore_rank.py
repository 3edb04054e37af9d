"""A rank of ``restore.py``: holds a model and its AdamW, sends or receives them through the plugin, or as plain bytes."""

import ctypes
import gc
import mmap
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import skip_init

from instep.hooks import Job, Recovery
from instep.model import Plan
from instep.torch.shared import Shared
from instep_state_replica.plugin import StateReplica

SECRET = b"of this benchmark"
WIDTH = 2048
PIECE = 1 << 18
"""Bytes of one plain read; more and fewer were slower here."""
Took = tuple[float, float]
"""Seconds of the clock, and of the processor in this process."""


class State:
    """A model of ``layers`` matrices and its AdamW, whose state exists only if it was ``allocated``."""

    def __init__(self, layers: int, *, value: float, allocated: bool, size: int) -> None:
        self.model = nn.Sequential(*(skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(value + number)
                if allocated:
                    zeros = [torch.full_like(parameter, value - number), torch.full_like(parameter, value)]
                    self.optimizer.state[parameter] = {"step": torch.tensor(value), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        self.shared = Shared(world_size=size)
        self.shared.add("model", self.model)
        self.shared.add("optimizer", self.optimizer)
        self.shared.check_coverage()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for share in self.shared.shares() for tensor in share.describe()[1])


class Rank:
    """Obeys the parent: each command is a method and its arguments, each answer what it returned."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = rank, size
        self.plugin = StateReplica()
        self.state: State | None = None
        self.used = memoryview(bytearray())
        self.landing: list[memoryview] = []

    def open(self, settings: Mapping[str, int]) -> int:
        """A new instance of the plugin; its port."""
        self.plugin.close()
        self.plugin = StateReplica(**settings)
        job = Job(self.rank, self.size, self.rank, 0, "127.0.0.1", SECRET)
        return dict(self.plugin.start(job))["peer"]

    def hold(self, layers: int, value: float, allocated: bool) -> int:
        """Hold a state, instead of the last one; its bytes."""
        self.state = None
        gc.collect()  # shared state and its shard groups refer to each other
        # A process that starts has no freed memory to use again.
        ctypes.CDLL(None).malloc_trim(0)
        self.state = State(layers, value=value, allocated=allocated, size=self.size)
        return self.state.bytes

    def restore(self, plan: Plan, fresh: bool) -> tuple[Took, int, int]:
        """How long it took, bytes received, and the most memory that it took at once on top of what there was, in bytes."""
        assert self.state is not None
        recovery = Recovery(
            plan=plan, rank=self.rank, fresh=fresh, torn=not fresh, secret=SECRET, shards=self.state.shared.shares(),
            check=lambda: None, gather=lambda data: [data], point=lambda _: None, deadline=time.monotonic() + 120,
        )  # fmt: skip
        before = _forget_peak()
        begin = _now()
        receipt = self.plugin.restore_state(recovery)
        took = _since(begin)
        assert receipt is not None
        return took, receipt.bytes, _memory("VmHWM") - before

    def digest(self) -> int:
        """Digest of all shared state."""
        assert self.state is not None
        return self.state.shared.shares()[0].digest()

    def fill(self, size: int) -> None:
        """Memory for plain bytes, all of it in use."""
        self.used = memoryview(bytearray(b"\1") * size)

    def send(self, port: int) -> Took:
        """Plain bytes, out."""
        with socket.create_connection(("127.0.0.1", port)) as sock:
            begin = _now()
            sock.sendall(self.used)
            sock.recv(1)
            return _since(begin)

    def listen(self, new: bool) -> int:
        """A port for plain bytes; with ``new``, two thirds of them go to memory that was never used."""
        size, third = len(self.used), len(self.used) // 3
        self.landing = [self.used[:third], memoryview(mmap.mmap(-1, size - third))] if new else [self.used]
        self.listener = socket.create_server(("127.0.0.1", 0))
        return int(self.listener.getsockname()[1])

    def receive(self) -> Took:
        """Plain bytes, in."""
        with self.listener, self.listener.accept()[0] as sock:
            begin = _now()
            for memory in self.landing:
                at = 0
                while at < len(memory):
                    at += sock.recv_into(memory[at : at + PIECE])
            took = _since(begin)
            sock.sendall(b"\1")
            self.landing = []
            return took


def _now() -> Took:
    return time.perf_counter(), time.process_time()


def _since(begin: Took) -> Took:
    now = _now()
    return now[0] - begin[0], now[1] - begin[1]


def _memory(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def _forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def main(rank: int, size: int, pipe: Connection) -> None:
    """The process."""
    own = Rank(rank, size)
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return
        work: Callable[..., object] = getattr(own, name)
        pipe.send(work(*arguments))
