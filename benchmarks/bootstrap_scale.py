"""What it takes until every rank knows its neighbour in NCCL's ring: messages and bytes, at each rank and at the busiest process.

    python benchmarks/bootstrap_scale.py --ranks 8 16 32 64 128 256

Everything up to 256 ranks is *counted* on real sockets: ranks are threads, the TCPStore is torch's own behind a proxy that counts, roots
and ranks speak NCCL's messages (those of 2.29 and later), the book is instep's own message. A message counts where it is sent and where
it is received, also when that is one process. The last lines are *extrapolated*: least squares over the counted rows, not measured.

Counted are: joining the store, exchanging ids, hello to the root and its answer; for ours the same without a store, and apart from it the
address book, which the agent sends with the first welcome and with each plan. Not counted is what all kinds do alike afterwards: the
ring's own all-gather, and connections between GPUs.
"""

import argparse
import json
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from bootstrap_counting import Ledger
from bootstrap_ranks import rootless, stock

PER_ROOT = 128
SMALLER = (8, 16)
"""More roots than 128 ranks each would give: the law that the rows of 128 follow shows at sizes that can be counted."""
FAR = 100_000
FIGURES = ("rank_messages", "rank_bytes", "busiest_messages", "busiest_bytes")
ONE, MANY, OURS, BOOK = "TCPStore, one root", "TCPStore, {} ranks a root", "computed ids, mini roots", "address book from the agent"
LAWS: Mapping[str, tuple[str, Callable[[int, int], Sequence[float]]]] = {
    ONE: ("a + b N", lambda n, _: (1, n)),
    MANY: ("a + b N + c roots + d N roots", lambda n, roots: (1, n, roots, n * roots)),
    OURS: ("a + b N", lambda n, _: (1, n)),
    BOOK: ("a + b N + c N²", lambda n, _: (1, n, n * n)),
}
"""What the sum over all processes, and what the busiest one has, may grow like."""


@dataclass(frozen=True)
class Row:
    """One counted job, or an extrapolated one. ``rank_*`` are sums over all ranks divided by their number.

    ``busiest`` names the process with the most messages and, if it is another one, that with the most bytes.
    """

    kind: str
    ranks: int
    roots: int
    rank_messages: float
    rank_bytes: float
    busiest_messages: float
    busiest_bytes: float
    busiest: str

    @property
    def law(self) -> str:
        """Which of the laws it follows."""
        return self.kind if self.kind in LAWS else MANY


def counted(kind: str, size: int, roots: int, ledger: Ledger) -> Row:
    """A row from what was counted."""
    of_ranks = [process for process in ledger.messages if process.startswith("rank ")]
    top = [max(counter, key=lambda process, counter=counter: counter[process]) for counter in (ledger.messages, ledger.bytes)]
    equal = min(ledger.bytes[rank] for rank in of_ranks) == ledger.bytes[top[1]]
    return Row(
        kind,
        size,
        roots,
        rank_messages=sum(ledger.messages[rank] for rank in of_ranks) / size,
        rank_bytes=sum(ledger.bytes[rank] for rank in of_ranks) / size,
        busiest_messages=max(ledger.messages.values()),
        busiest_bytes=max(ledger.bytes.values()),
        busiest="every rank" if equal else ", ".join(dict.fromkeys(top)),
    )


def measure(size: int) -> Iterator[Row]:
    """All kinds at one size. torch takes one root for up to 128 ranks, whatever it is told."""
    yield counted(ONE, size, 1, stock(size, 1))
    for each in (*SMALLER, PER_ROOT):
        if size > each:
            roots = -(-size // each)
            yield counted(MANY.format(each), size, roots, stock(size, roots))
    book, bootstrap = rootless(size)
    yield counted(OURS, size, size, bootstrap)
    yield counted(BOOK, size, size, book)


def extrapolate(rows: Sequence[Row], law: str, name: str, *, size: int, roots: int) -> tuple[Row, float]:
    """A row for a size that was not counted, and by how much of a counted value the fit misses it at worst."""
    (_, features), worst = LAWS[law], 0.0
    got = [row for row in rows if row.law == law]
    matrix = np.array([features(row.ranks, row.roots) for row in got], dtype=float)
    values = {}
    for figure in FIGURES:
        per_rank = figure.startswith("rank_")
        seen = np.array([getattr(row, figure) * (row.ranks if per_rank else 1) for row in got], dtype=float)
        weights = 1 / seen  # errors count by their share of the value, or the largest row alone would decide
        factors, *_ = np.linalg.lstsq(matrix * weights[:, None], seen * weights, rcond=None)
        worst = max(worst, float(np.max(np.abs(matrix @ factors * weights - 1))))
        values[figure] = float(factors @ np.array(features(size, roots), dtype=float)) / (size if per_rank else 1)
    return Row(name, size, roots, **values, busiest=got[-1].busiest), worst


def human(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def draw(row: Row, note: str = "") -> None:
    """One line."""
    print(
        f"{row.kind:28} {row.ranks:7,} {row.roots:7,} {row.rank_messages:9.1f} {human(row.rank_bytes):>9} "
        f"{row.busiest_messages:11,.0f} {human(row.busiest_bytes):>9}  {row.busiest}{note}"
    )


def main() -> None:
    """Count, fit and print."""
    parser = argparse.ArgumentParser(description="messages and bytes until every rank knows its neighbour")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a rank takes about ten descriptors of this process
    rows = [row for size in arguments.ranks for row in measure(size)]
    far = []
    for law, roots in ((ONE, 1), (MANY, -(-FAR // PER_ROOT)), (OURS, FAR), (BOOK, FAR)):
        enough = len({(row.ranks, row.roots) for row in rows if row.law == law}) > len(LAWS[law][1](1, 1))
        if enough:
            far.append((law, *extrapolate(rows, law, law.format(PER_ROOT), size=FAR, roots=roots)))
    if arguments.json:
        fits = [{"law": LAWS[law][0], "worst_miss": worst, **vars(row)} for law, row, worst in far]
        print(json.dumps({"counted": [vars(row) for row in rows], "extrapolated": fits}))
        return
    print(f"{'counted':28} {'ranks':>7} {'roots':>7} {'msgs/rank':>9} {'per rank':>9} {'busiest msg':>11} {'bytes':>9}  which is")
    for row in rows:
        draw(row)
    print("\nextrapolated by least squares over the rows above, not counted")
    for law, row, worst in far:
        draw(row, f"  ({LAWS[law][0]}, misses a counted row by {100 * worst:.1f} % at most)")


if __name__ == "__main__":
    main()
