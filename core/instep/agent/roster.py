"""What the agent knows about each rank: its present birth, and what its births left for the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from instep.agent.records import Progress, State
from instep.messages import Done, Hello, Injection, Welcome
from instep.model import AddressBook, Json, Vote

_OUTSIDE = (State.OUTSIDE, State.SETUP, State.ENDED)


@dataclass
class Member:
    """One rank.

    ``joined``: the present birth was ever in step; ``voted``: it has ever voted, so its set-up is over; ``in_step``: the incarnation
    it is in step with. ``hung``: why and when the watchdog had it killed. ``fired``: when its last injection fired. ``reached`` (the
    step of the last birth that was in step), ``once`` and ``finished`` outlive a birth.
    """

    rank: int
    birth: int = 0
    born: bool = False
    hello: Hello | None = None
    vote: Vote | None = None
    joined: bool = False
    voted: bool = False
    in_step: int | None = None
    done: Done | None = None
    closed: bool = False
    ended: bool = False
    hung: tuple[str, float] | None = None
    fired: float | None = None
    reached: int | None = None
    once: dict[int, Json] = field(default_factory=dict)
    finished: list[Done] = field(default_factory=list)

    def replace(self, progress: Progress) -> None:
        """The present birth is dead, and got as far as ``progress``; the next one starts with what outlives it."""
        reached = self.step(progress)
        fresh = Member(self.rank, birth=self.birth + 1, reached=reached, once=self.once, finished=self.finished)
        self.__dict__.update(fresh.__dict__)

    def step(self, progress: Progress) -> int:
        """Steps that this rank has committed, whatever a replacement that is not in step yet writes into the record."""
        return progress.step if self.joined or self.reached is None else self.reached

    def outside(self, progress: Progress, released: int) -> bool:
        """Whether main is out of every block, so that nothing could be run again in process."""
        if not self.joined:
            return False
        return progress.state in _OUTSIDE or (progress.state is State.DONE and progress.block <= released)

    def evidence(self, now: float) -> float:
        """When the fault of this rank happened: the injection if one fired, else the verdict, else now."""
        if self.fired is not None:
            return self.fired
        return now if self.hung is None else self.hung[1]

    def welcome(
        self, incarnation: int, book: AddressBook | None, *, config: Mapping[str, Json], secret: str, injections: Sequence[Injection]
    ) -> Welcome:
        """The answer to ``Hello``, with everything that earlier births left."""
        return Welcome(
            incarnation=incarnation,
            book=book,
            config=config,
            secret=secret,
            once=tuple(value for _, value in sorted(self.once.items())),
            finished=tuple(self.finished),
            injections=tuple(i for i in injections if i.rank == self.rank and i.birth in (None, self.birth)),
        )


def ranks(members: Sequence[Member]) -> str:
    """The ranks in words: ``rank 2`` or ``ranks 0, 1``."""
    return f"rank{'s' if len(members) != 1 else ''} {', '.join(str(m.rank) for m in members)}"
