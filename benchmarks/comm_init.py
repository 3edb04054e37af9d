"""How long processes take to connect one gloo group: with computed addresses, and with a TCPStore.

    python benchmarks/comm_init.py --ranks 8 16 32 --rounds 7 --json

*First*: nothing is there yet. TCPStore: the store is opened and joined, a device made. Computed: a device is made, its address goes to the
parent, which plays the agent and sends everybody the book. *Again*: a group replaces an earlier one. TCPStore: the store stays, keys get a
new prefix. Computed: device and addresses stay, and pair numbers have travelled with the votes, so no message is sent at all.
Both kinds take turns in the same processes. Times are those of the slowest rank, medians over the rounds, in milliseconds.
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

import torch
import torch.distributed as dist
from instep_init_gloo.device import Device
from instep_init_gloo.store import BookStore
from instep_init_gloo.wire import Endpoint

PATIENCE = 120.0
KINDS = ("tcpstore", "computed")
Times = dict[str, list[float]]


class Member:
    """One rank: opens and connects both ways, and keeps the time."""

    def __init__(self, rank: int, size: int, parent: Connection, barrier: Barrier) -> None:
        self.rank, self.size, self.parent, self.barrier = rank, size, parent, barrier
        self.device: Device | None = None
        self.store: dist.Store | None = None
        self.times: Times = {}

    def share(self, own: Endpoint) -> list[Endpoint]:
        """Everybody's endpoint, by way of the parent."""
        self.parent.send_bytes(json.dumps([own.host, own.port, own.first]).encode())
        return [Endpoint(*entry) for entry in json.loads(self.parent.recv_bytes())]

    def tcpstore(self, port: int, prefix: str) -> dist.ProcessGroupGloo:
        """A group over a TCPStore that rank 0 serves."""
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", port, self.size, is_master=self.rank == 0, timeout=timedelta(seconds=PATIENCE))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=PATIENCE)
        return dist.ProcessGroupGloo(dist.PrefixStore(prefix, self.store), self.rank, self.size, options)

    def computed(self, book: Sequence[Endpoint]) -> dist.ProcessGroupGloo:
        """A group from an address book."""
        assert self.device is not None
        store = BookStore(self.rank, dict(enumerate(book)))
        return self.device.group(store, rank=self.rank, size=self.size, timeout=PATIENCE, threads=2)

    def first_computed(self) -> dist.ProcessGroupGloo:
        """Device, book and group."""
        self.device = Device(host="127.0.0.1", interface=None)
        return self.computed(self.share(self.device.probe()))

    def measure(self, name: str, connect: Callable[[], dist.ProcessGroupGloo]) -> None:
        """Connect at the same time as all others, and reduce once."""
        self.barrier.wait(PATIENCE)
        begin = time.perf_counter()
        group = connect()
        connected = time.perf_counter()
        tensor = torch.ones(8)
        group.allreduce([tensor]).wait()
        end = time.perf_counter()
        if tensor[0] != self.size:
            raise SystemExit(f"{name}: the sum is wrong")
        self.times.setdefault(f"{name} constructor", []).append(connected - begin)
        self.times.setdefault(f"{name} all-reduce", []).append(end - begin)
        self.barrier.wait(PATIENCE)

    def round(self, number: int, port: int) -> None:
        """Both kinds in turn, first and again."""
        self.device = self.store = None
        jobs = {
            "tcpstore": lambda: self.measure("first tcpstore", lambda: self.tcpstore(port, "first")),
            "computed": lambda: self.measure("first computed", self.first_computed),
        }
        for kind in KINDS if number % 2 else reversed(KINDS):
            jobs[kind]()
        assert self.device is not None
        book = self.share(self.device.probe())
        jobs = {
            "tcpstore": lambda: self.measure("again tcpstore", lambda: self.tcpstore(port, "again")),
            "computed": lambda: self.measure("again computed", lambda: self.computed(book)),
        }
        for kind in KINDS if number % 2 else reversed(KINDS):
            jobs[kind]()


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
        for when in ("first", "again"):
            for what in ("constructor", "all-reduce"):
                store, computed = medians[f"{when} tcpstore {what}"], medians[f"{when} computed {what}"]
                rows.append({"ranks": size, "init": when, "until": what, "tcpstore_ms": store, "computed_ms": computed, "ratio": store / computed})
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "rows": rows}))
        return
    print(f"{'ranks':>5}  {'init':5}  {'until':11}  {'TCPStore ms':>11}  {'computed ms':>11}  {'ratio':>5}")
    for row in rows:
        print("{ranks:5}  {init:5}  {until:11}  {tcpstore_ms:11.1f}  {computed_ms:11.1f}  {ratio:5.1f}".format(**row))


if __name__ == "__main__":
    main()
