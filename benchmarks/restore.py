"""How fast state moves from donors to a rank: against plain bytes over the same loopback, and beside torchft's HTTP transport.

    python benchmarks/restore.py --json
    python benchmarks/restore.py --peer /elsewhere/bin/python     # an environment with torchft

A model and its AdamW of one gigabyte, restored by the plugin ``state_replica``: over the memory that a torn survivor has, and by a
replacement whose optimizer has no state yet. Plain bytes: ``sendall`` and ``recv_into`` of as many, into memory that is in use, or of which
as much is new as is to the replacement. All ways take turns, plain bytes before each, and a ratio is the median of the rounds' own ratios:
one and the same way takes half as long again in some rounds, and the best of each would compare their luck. ``best`` are the ratios of
those, for comparison; ``busiest`` the median ones in processor seconds of whichever process took most, which is how long a transfer takes
when nobody else computes. torchft receives into new memory, and digests nothing. Extra memory is the most that a process held on top of
the state itself. Exit code 0 only if every bar holds.
"""

import argparse
import json
import multiprocessing
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import bars
from restore_rank import Took
from restore_rank import main as rank_main

from instep.model import Address, AddressBook, Plan, Role

PATIENCE = 120
RANKS, RECEIVER = 4, 3
LAYER = 3 * 4 * (2048 * 2048 + 2048)
BARS = {
    "torn_over_plain": (0.7, "least"),
    "torn_digested_over_plain": (0.5, "least"),
    "new_over_plain": (0.7, "least"),
    "new_digested_over_plain": (0.5, "least"),
    "two_donors_over_one": (0.95, "least"),
    "three_donors_over_one": (0.95, "least"),
    "extra_mib_receiver": (64.0, "most"),
    "extra_mib_donor": (64.0, "most"),
}
CASES = {
    "torn": (1, False, False),
    "torn_digested": (1, False, True),
    "new": (1, True, False),
    "new_digested": (1, True, True),
    "two_donors": (2, False, True),
    "three_donors": (3, False, True),
}
"""Number of donors, whether the receiver is a replacement, whether stripes are digested."""


class Ranks:
    """Donors and a receiver, each a process of its own."""

    def __init__(self, layers: int) -> None:
        self.layers, self.incarnation = layers, 0
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            context.Process(target=rank_main, args=(rank, RANKS, theirs), daemon=True).start()
            self.pipes.append(ours)
        for rank in range(RANKS):
            self.bytes = self.do(rank, "hold", layers, 1.0, True)
        self.digest = self.do(0, "digest")
        for rank in (0, RECEIVER):
            self.do(rank, "fill", self.bytes)

    def tell(self, rank: int, name: str, *arguments: object) -> None:
        """Begin a command on a rank."""
        self.pipes[rank].send((name, arguments))

    def hear(self, rank: int) -> Any:
        """What came of it."""
        if not self.pipes[rank].poll(PATIENCE):
            raise SystemExit(f"rank {rank} said nothing for {PATIENCE} s")
        return self.pipes[rank].recv()

    def do(self, rank: int, name: str, *arguments: object) -> Any:
        """A command, from beginning to end."""
        self.tell(rank, name, *arguments)
        return self.hear(rank)

    def plain(self, *, new: bool) -> Took:
        """Plain bytes; with ``new``, two thirds of the memory have never been used."""
        port = self.do(RECEIVER, "listen", new)
        self.tell(RECEIVER, "receive")
        self.tell(0, "send", port)
        return _slowest([self.hear(RECEIVER), self.hear(0)])

    def restore(self, donors: int, *, new: bool, digested: bool) -> tuple[Took, float, float]:
        """How long it took, and the extra memory of the receiver and of the donor that took most, in MiB."""
        taking = [*range(donors), RECEIVER]
        ports = {rank: self.do(rank, "open", {"digest_stripes": digested}) for rank in taking}
        self.do(RECEIVER, "hold", self.layers, 0.0, not new)
        plan = self._plan(donors, ports)
        for rank in taking:
            self.tell(rank, "restore", plan, new)
        took, received, extra = zip(*(self.hear(rank) for rank in taking), strict=True)
        if self.do(RECEIVER, "digest") != self.digest:
            raise SystemExit("what arrived is not what was sent")
        if received[-1] != self.bytes:
            raise SystemExit(f"{received[-1]} bytes arrived, not {self.bytes}")
        allocated = self.bytes * 2 / 3 if new else 0
        return _slowest(took), (extra[-1] - allocated) / 2**20, max(extra[:-1]) / 2**20

    def _plan(self, donors: int, ports: dict[int, int]) -> Plan:
        self.incarnation += 1
        addresses = tuple(Address(rank=r, birth=0, host="127.0.0.1", ports={"peer": ports.get(r, 1)}) for r in range(RANKS))
        book = AddressBook(incarnation=self.incarnation, addresses=addresses)
        roles = tuple(Role.RESTORE if rank == RECEIVER else Role.KEEP for rank in range(RANKS))
        senders = {"replica": tuple(range(donors))}
        return Plan(incarnation=self.incarnation, block=0, step=1, roles=roles, donors=senders, book=book)


class Peer:
    """torchft in an environment of its own."""

    def __init__(self, python: str, layers: int) -> None:
        command = [python, str(Path(__file__).with_name("restore_torchft.py")), str(layers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def transfer(self) -> dict[str, Took]:
        """How long one transfer took, each way that it has."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return {name: _slowest(took) for name, took in json.loads(self._process.stdout.readline()).items()}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(PATIENCE)


def measure(layers: int, rounds: int, python: str | None) -> dict[str, float]:
    """All figures by name."""
    ranks, peer = Ranks(layers), Peer(python, layers) if python else None
    times: defaultdict[str, list[Took]] = defaultdict(list)
    receiver = donor = 0.0
    for _ in range(rounds):
        for name, (donors, new, digested) in CASES.items():
            times[f"plain_{name}"].append(ranks.plain(new=new))
            took, more, most = ranks.restore(donors, new=new, digested=digested)
            times[name].append(took)
            receiver, donor = max(receiver, more), max(donor, most)
        for name, took in (peer.transfer() if peer else {}).items():
            times[name].append(took)
    for rank in range(RANKS):
        ranks.tell(rank, "end")
    if peer:
        peer.close()
    clock = {name: [seconds for seconds, _ in took] for name, took in times.items()}
    figures = {f"{name}_gb_s": ranks.bytes / median(seconds) / 1e9 for name, seconds in clock.items()} | _ratios(clock)
    busiest = _ratios({name: [busy for _, busy in took] for name, took in times.items()})
    best = _ratios({name: [min(seconds)] for name, seconds in clock.items()})
    figures |= {f"best_{name}": ratio for name, ratio in best.items()} | {f"busiest_{name}": ratio for name, ratio in busiest.items()}
    return {**figures, "extra_mib_receiver": receiver, "extra_mib_donor": donor}


def _slowest(took: Iterable[Took]) -> Took:
    clock, processor = zip(*took, strict=True)
    return max(clock), max(processor)


def _ratios(took: Mapping[str, Sequence[float]]) -> dict[str, float]:
    figures = {f"{name}_over_plain": _ratio(took[f"plain_{name}"], took[name]) for name in ("torn", "torn_digested", "new", "new_digested")}
    figures |= {f"{name}_over_one": _ratio(took["torn_digested"], took[name]) for name in ("two_donors", "three_donors")}
    return figures | {f"new_over_{name}": _ratio(seconds, took["new"]) for name, seconds in took.items() if name.startswith("torchft")}


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """How many times as fast, in the median round."""
    return median(a / b for a, b in zip(slower, faster, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--peer", help="interpreter of an environment with torchft")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(max(1, round(args.gigabytes * 1e9 / LAYER)), args.rounds, args.peer)
    bars.end(result, BARS, as_json=args.json)


if __name__ == "__main__":
    main()
