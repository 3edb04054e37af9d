"""How long processes take to connect one gloo group: with computed addresses, and with a TCPStore.

    python benchmarks/comm_init.py --ranks 8 16 32 --rounds 7 --json

*Meeting* happens once. TCPStore: its server runs already, as under torchrun; everybody joins it. Computed: everybody makes a device, its
address goes to the parent, which plays the agent and sends everybody the book. *Constructor* and *all-reduce* (constructor included) come
after that, for the first group and again for one in its place. TCPStore: a new device, and keys under a new prefix. Computed: nothing is
sent at all, for pair numbers have travelled with the book or the votes.
Both kinds take turns in the same processes. Times are those of the slowest rank, medians over the rounds, in milliseconds.
Every rank opens a connection to every other one in both kinds; with fewer cores than ranks that is what most of the time goes into.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import TypeVar

import torch
import torch.distributed as dist

from instep_init_gloo.device import Device
from instep_init_gloo.wire import Endpoint

PATIENCE = 120.0
KINDS = ("tcpstore", "computed")
ROWS = (("first", "meeting"), ("first", "constructor"), ("first", "all-reduce"), ("again", "constructor"), ("again", "all-reduce"))
Times = dict[str, list[float]]
T = TypeVar("T")


class Member:
    """One rank: opens and connects both ways, and keeps the time."""

    def __init__(self, rank: int, size: int, parent: Connection, barrier: Barrier) -> None:
        self.rank, self.size, self.parent, self.barrier = rank, size, parent, barrier
        self.device: Device | None = None
        self.store: dist.Store | None = None
        self.book: list[Endpoint] = []
        self.times: Times = {}

    def share(self, own: Endpoint) -> list[Endpoint]:
        """Everybody's endpoint, by way of the parent."""
        self.parent.send_bytes(json.dumps([own.host, own.port, own.first]).encode())
        return [Endpoint(*entry) for entry in json.loads(self.parent.recv_bytes())]

    def join(self, port: int) -> None:
        """Meeting by a TCPStore."""
        self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=PATIENCE))

    def gather(self) -> None:
        """Meeting by the parent."""
        self.device = Device(host="127.0.0.1", interface=None)
        self.book = self.share(self.device.probe())

    def tcpstore(self, prefix: str) -> dist.ProcessGroupGloo:
        """A group over the TCPStore."""
        assert self.store is not None
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=PATIENCE)
        return dist.ProcessGroupGloo(dist.PrefixStore(prefix, self.store), self.rank, self.size, options)

    def computed(self) -> dist.ProcessGroupGloo:
        """A group from the address book."""
        assert self.device is not None
        at = self.device.rendezvous(self.rank, dict(enumerate(self.book)))
        return self.device.connect(at, rank=self.rank, size=self.size, timeout=PATIENCE, threads=2)

    def clock(self, name: str, work: Callable[[], T]) -> tuple[T, float]:
        """Begin at the same time as all others; what `work` gives, and when it began."""
        self.barrier.wait(PATIENCE)
        begin = time.perf_counter()
        result = work()
        self.times.setdefault(name, []).append(time.perf_counter() - begin)
        return result, begin

    def connect(self, kind: str, when: str) -> None:
        """Connect and reduce once."""
        make = {"tcpstore": lambda: self.tcpstore(when), "computed": self.computed}[kind]
        group, begin = self.clock(f"{when} {kind} constructor", make)
        tensor = torch.ones(8)
        group.allreduce([tensor]).wait()
        self.times.setdefault(f"{when} {kind} all-reduce", []).append(time.perf_counter() - begin)
        if tensor[0] != self.size:
            raise SystemExit(f"{kind}: the sum is wrong")
        self.barrier.wait(PATIENCE)

    def round(self, number: int, port: int) -> None:
        """Everything once, both kinds in turn."""
        kinds = KINDS if number % 2 else KINDS[::-1]
        self.device = self.store = None
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        for kind in kinds:
            self.clock(f"first {kind} meeting", {"tcpstore": lambda: self.join(port), "computed": self.gather}[kind])
        for kind in kinds:
            self.connect(kind, "first")
        assert self.device is not None
        self.book = self.share(self.device.probe())
        for kind in kinds:
            self.connect(kind, "again")
        del server


def member(rank: int, size: int, ports: Sequence[int], parent: Connection, barrier: Barrier) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    own = Member(rank, size, parent, barrier)
    for number, port in enumerate(ports):
        own.round(number, port)
    parent.send_bytes(json.dumps(own.times).encode())
    barrier.wait(PATIENCE)
    os._exit(0)


def run(size: int, rounds: int) -> dict[str, float]:
    """Medians in milliseconds by name."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(size)
    pipes = [context.Pipe() for _ in range(size)]
    ports = _free_ports(rounds)
    ranks = [context.Process(target=member, args=(r, size, ports, pipes[r][1], barrier), daemon=True) for r in range(size)]
    for process in ranks:
        process.start()
    for _ in range(2 * rounds):
        book = b"[" + b",".join(_receive(pipe) for pipe, _ in pipes) + b"]"
        for pipe, _ in pipes:
            pipe.send_bytes(book)
    times: list[Times] = [json.loads(_receive(pipe)) for pipe, _ in pipes]
    for process in ranks:
        process.join(PATIENCE)
    return {name: 1000 * statistics.median(map(max, zip(*(t[name] for t in times), strict=True))) for name in times[0]}


def _receive(pipe: Connection) -> bytes:
    if not pipe.poll(PATIENCE):
        raise SystemExit(f"a rank said nothing for {PATIENCE} s")
    return pipe.recv_bytes()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="computed addresses against TCPStore")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for size in arguments.ranks:
        medians = run(size, arguments.rounds)
        for when, what in ROWS:
            store, computed = medians[f"{when} tcpstore {what}"], medians[f"{when} computed {what}"]
            row = {"ranks": size, "init": when, "until": what, "tcpstore_ms": store, "computed_ms": computed}
            rows.append({**row, "ratio": store / computed})
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "rows": rows}))
        return
    print(f"{'ranks':>5}  {'init':5}  {'what':11}  {'TCPStore ms':>11}  {'computed ms':>11}  {'ratio':>5}")
    for row in rows:
        print("{ranks:5}  {init:5}  {until:11}  {tcpstore_ms:11.1f}  {computed_ms:11.1f}  {ratio:5.1f}".format(**row))


if __name__ == "__main__":
    main()
