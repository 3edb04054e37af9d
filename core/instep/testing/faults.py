"""A fluent injector of faults: ``faults.kill(rank=2).at(step=5, phase="backward")``.

What it collects are ``Injection`` values, which real processes under an agent and the drill take as they are. Whatever else can play them
(a simulator) offers ``Stage`` and is given them by ``faults.on(stage)``.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from instep.config import suggest
from instep.errors import UsageError
from instep.injection import POINTS
from instep.messages import Injection

Kind = Literal["kill", "raise", "hang"]


class Stage(Protocol):
    """Anything that can make faults happen."""

    def place(self, injections: Sequence[Injection]) -> None:
        """Make each of them happen once, when its rank first reaches its point of its step."""


class Placing:
    """A fault without a place yet; ``at`` gives it one, and returns the injector, so that faults can be chained."""

    def __init__(self, faults: "Faults", kind: Kind, rank: int, birth: int | None) -> None:
        self._faults, self._kind, self._rank, self._birth = faults, kind, rank, birth

    def at(self, *, step: int | None = None, phase: str = "step", mark: str | None = None) -> "Faults":
        """Place it.

        Args:
            step: the step that the rank works on, from 0; ``None`` for any, which suits phases of a recovery.
            phase: one of ``instep.injection.POINTS``, alternatives joined with ``|``: the first that is reached counts. ``issue#3`` is
                the third collective of the step.
            mark: instead of a phase, a place of the script's own, which calls ``instep.testing.point(mark)``.

        Raises:
            UsageError: there is no such phase, or the step is negative.
        """
        for name in () if mark is not None else phase.split("|"):
            if name.partition("#")[0] not in POINTS:
                raise UsageError(f"there is no phase '{name}'; {suggest(name, POINTS)}")
        if step is not None and step < 0:
            raise UsageError(f"step {step}: steps count from 0")
        self._faults.add(self._kind, rank=self._rank, birth=self._birth, step=step, point=mark if mark is not None else phase)
        return self._faults


class Faults:
    """Faults to inject, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._placed: list[Injection] = []

    def __iter__(self) -> Iterator[Injection]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def __repr__(self) -> str:
        return "Faults(" + ", ".join(f"{i.kind} {i.rank}@{i.step} {i.point}" for i in self._placed) + ")"

    @property
    def placed(self) -> tuple[Injection, ...]:
        """All of them, for ``Launch(injections=...)``."""
        return tuple(self._placed)

    def kill(self, *, rank: int, birth: int | None = None) -> Placing:
        """SIGKILL; ``birth`` limits it to one birth of the rank (0 is the first)."""
        return self._of("kill", rank, birth)

    def raises(self, *, rank: int, birth: int | None = None) -> Placing:
        """An exception in the rank's own code."""
        return self._of("raise", rank, birth)

    def hang(self, *, rank: int, birth: int | None = None) -> Placing:
        """SIGSTOP: the process is there and says nothing."""
        return self._of("hang", rank, birth)

    def add(self, kind: Kind, *, rank: int, birth: int | None, step: int | None, point: str) -> None:
        """Place a fault; ``kill(...).at(...)`` says it better."""
        self._placed.append(Injection(id=len(self._placed) + 1, rank=rank, kind=kind, step=step, point=point, birth=birth))

    def on(self, stage: Stage) -> None:
        """Give them all to whatever makes them happen."""
        stage.place(self.placed)

    def missing(self, fired: Sequence[int]) -> tuple[Injection, ...]:
        """Those that never happened, given the ids of those that did (``Outcome.fired``)."""
        return tuple(i for i in self._placed if i.id not in fired)

    def _of(self, kind: Kind, rank: int, birth: int | None) -> Placing:
        if rank < 0:
            raise UsageError(f"rank {rank}: ranks count from 0")
        return Placing(self, kind, rank, birth)
