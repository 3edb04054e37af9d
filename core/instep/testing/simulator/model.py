"""The training run that is simulated: shared and private state as numbers, and the run that it must be, step by step.

A step draws from private state, sums over all ranks, and moves shared state in a commit. The reference is computed without any part
of instep, so "bit for bit the run without faults" is one comparison.
"""

from dataclasses import dataclass, field

from instep.agent.records import SLOTS
from instep.errors import InstepError

MASK = (1 << 64) - 1
Shared = tuple[int, int]
"""Two numbers, written one after the other: a rank that dies or raises between them is torn."""


def mix(x: int, y: int) -> int:
    """A hash of two numbers, 64 bits."""
    z = ((x ^ y) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK
    return z ^ (z >> 29)


def draw(private: int) -> int:
    """What a generator holds after one draw."""
    return (private * 6364136223846793005 + 1442695040888963407) & MASK


def first_private(rank: int, seed: int) -> int:
    """What a rank's generator holds at the start."""
    return mix(seed & MASK, rank + 1)


def moved(shared: Shared, total: int) -> Shared:
    """Shared state after a commit."""
    return mix(shared[0], total), mix(shared[1], total + 1)


@dataclass(frozen=True)
class Reference:
    """The run without faults: shared state, and private state by rank, after each number of commits."""

    shared: list[Shared]
    private: list[list[int]]

    @classmethod
    def of(cls, world: int, steps: int, seed: int) -> "Reference":
        """Compute it."""
        shared, private = [(1, 2)], [[first_private(rank, seed) for rank in range(world)]]
        for _ in range(steps):
            drawn = [draw(p) for p in private[-1]]
            total = sum(mix(p, shared[-1][0]) for p in drawn) & MASK
            private.append(drawn)
            shared.append(moved(shared[-1], total))
        return cls(shared, private)


@dataclass
class Slots:
    """The private record of a rank, as ``instep.agent.records.Slots`` keeps it; outlives its births."""

    kept: dict[int, tuple[int, int]] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Mark the slot invalid."""
        self.kept.pop(step % SLOTS, None)

    def end(self, step: int, value: int) -> None:
        """Make the slot valid."""
        self.kept[step % SLOTS] = step, value

    def load(self, step: int) -> int:
        """The value of ``step``. Raises ``InstepError`` when the slot holds another one."""
        have = self.kept.get(step % SLOTS)
        if have is None or have[0] != step:
            raise InstepError(f"the record of this rank holds no private state of step {step}")
        return have[1]
