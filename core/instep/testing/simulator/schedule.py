"""What a seed means: the size of the job, the troubles that befall it, and how badly its control messages travel."""

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "kill", "vanish", "exit", "raise", "hang", "spin", "stop", "slow", "pause", "reset", "corrupt", "hook", "detect", "server"
]  # fmt: skip
"""``vanish``: killed, and no connection of it is closed. ``hang``: main stands still, and cannot be interrupted; ``spin``: it can.

``stop``: the whole process is frozen. ``pause``: main stands still for a moment. ``reset``: its connections break, it lives.
``corrupt``: what it receives next is wrong. ``hook``: a plugin raises in it. ``detect``: a detector of the agent finds it guilty.
``server``: the fork server dies.
"""

SCRIPT = ("loader", "forward", "backward", "collective", "step", "done", "between")
COMMIT = ("record", "slot", "prepared", "barrier", "body", "amid", "after", "tell")
RECOVERY = ("quiesce", "plan", "connect", "reinit_comms", "restore_state", "restore", "mid_transfer", "resume_data", "verify", "setup")
HOOKS = ("quiesce", "reinit_comms", "restore_state", "resume_data", "verify", "announce")
_KINDS: dict[Kind, int] = {
    "kill": 30,
    "vanish": 6,
    "exit": 2,
    "raise": 12,
    "hang": 4,
    "spin": 3,
    "stop": 4,
    "slow": 6,
    "pause": 8,
    "reset": 6,
    "corrupt": 6,
    "hook": 8,
    "detect": 2,
    "server": 1,
}


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong on a rank, once.

    It happens at the rank's ``place``-th place, or ``after`` so many places since the newest other trouble, or at a named point after
    ``skip`` passages.
    """

    kind: Kind
    rank: int
    place: int | None = None
    after: int | None = None
    point: str | None = None
    skip: int = 0
    hook: str = ""


@dataclass(frozen=True)
class Schedule:
    """One simulated job.

    ``blocks``: the step at which each block ends. ``sums``: collectives in a step. ``lossy``: control messages get lost, late, doubled and
    out of order, which the socket of one machine never does. ``pace``: how likely a rank is overtaken at a place.
    """

    seed: int
    world: int = 3
    blocks: tuple[int, ...] = (3,)
    sums: int = 1
    lossy: bool = False
    pace: float = 0.5
    max_restarts: int = 0
    troubles: tuple[Trouble, ...] = ()

    @property
    def steps(self) -> int:
        """Commits of the whole run."""
        return self.blocks[-1]


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = Random(seed * 2 + 1)
    world = chance.choice((2, 3, 3, 3, 4, 4, 5))
    blocks = chance.choice(((2,), (3,), (4,), (2, 3), (1, 3), (2, 2)))
    many = chance.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4))
    return Schedule(
        seed=seed,
        world=world,
        blocks=blocks,
        sums=chance.choice((0, 1, 1, 1, 2)),
        lossy=chance.random() < 0.2,
        pace=chance.choice((0.2, 0.5, 0.8)),
        max_restarts=chance.choice((0, 0, 0, 1)),
        troubles=tuple(_trouble(chance, world, blocks[-1], number) for number in range(many)),
    )


def _trouble(chance: Random, world: int, steps: int, number: int) -> Trouble:
    kind = chance.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
    rank = chance.randrange(world)
    hook = chance.choice(HOOKS) if kind == "hook" else ""
    if number and chance.random() < 0.4:
        return Trouble(kind, rank, after=min(int(chance.expovariate(0.15)), 60), hook=hook)
    if chance.random() < 0.4:
        return Trouble(kind, rank, place=chance.randrange(16 + 14 * steps + 20 * number), hook=hook)
    later = RECOVERY if number else ()
    point = chance.choice((*SCRIPT, *COMMIT, *COMMIT, *later, *later, *later))
    return Trouble(kind, rank, point=point, skip=chance.randrange(1 if point in RECOVERY else steps + 1), hook=hook)
