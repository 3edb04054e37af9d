"""What the coordinator knows about a job: data, and the few verbs by which its parts act on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from instep.agent import events as ev
from instep.agent.breaker import Breaker, Budget
from instep.agent.incident import Incident
from instep.agent.records import Progress
from instep.agent.roster import Member
from instep.messages import Faulted, Injection, Message
from instep.model import Fault, Json, Plan, Unrecoverable, Vote

Planner = Callable[[Sequence[Vote]], Plan | Unrecoverable]


@dataclass(frozen=True)
class Terms:
    """What a job is started with. ``config`` goes to the workers as it is; ``recoveries`` and ``same_fault`` trip the breaker."""

    world: int
    secret: str
    config: Mapping[str, Json]
    max_restarts: int = 0
    recoveries: int = 5
    same_fault: int = 3
    injections: tuple[Injection, ...] = ()


@dataclass
class Life:
    """What belongs to one start of the job, and is forgotten when the whole job starts again.

    ``live``: all ranks have joined once. ``released``: the newest block that all have left. ``held``: a communication error that
    waits until ``(seconds)`` for the death behind it.
    """

    members: list[Member]
    breaker: Breaker
    incarnation: int = 0
    live: bool = False
    first_step: int | None = None
    released: int = -1
    planned: bool = False
    gathers: dict[str, dict[int, Mapping[str, Json]]] = field(default_factory=dict)
    held: tuple[int, Faulted, float] | None = None


class Job:
    """The state of one job. ``planner`` decides on votes, ``progress`` reads a rank's record; actions are collected by the verbs."""

    def __init__(self, terms: Terms, *, planner: Planner, progress: Callable[[int], Progress]) -> None:
        self.terms, self.planner, self.progress = terms, planner, progress
        self.injections = list(terms.injections)
        self.budget = Budget(terms.max_restarts)
        self.restarts = 0
        self.incidents = 0
        self.incident: Incident | None = None
        self.clearing = self.over = self.greeted = False
        self.now = 0.0
        self._out: list[ev.Action] = []
        self.life = self._new_life()

    def _new_life(self) -> Life:
        terms = self.terms
        breaker = Breaker(recoveries=terms.recoveries, same=terms.same_fault)
        return Life(members=[Member(rank) for rank in range(terms.world)], breaker=breaker)

    @property
    def members(self) -> list[Member]:
        """One member a rank, in order."""
        return self.life.members

    @property
    def plain(self) -> bool:
        """Whether no rank ever called ``instep.init``: a script that knows nothing of instep."""
        return not self.greeted

    def take(self) -> list[ev.Action]:
        """The actions collected since the last call; births first, since they take longest."""
        out, self._out = self._out, []
        return sorted(out, key=lambda action: not isinstance(action, ev.Spawn))

    def act(self, *actions: ev.Action) -> None:
        """Add actions, in order."""
        self._out += actions

    def send(self, message: Message, *members: Member) -> None:
        """Send a message to these members, to all if none is named; those without a ``Hello`` do not listen."""
        self.act(*(ev.Send(m.rank, message) for m in members or self.members if m.hello is not None and not m.ended))

    def log(self, text: str) -> None:
        """One line for the console."""
        self.act(ev.Log(text))

    def begin(self) -> None:
        """Start every rank, with nothing known about any."""
        self.life = self._new_life()
        self.act(*(ev.Spawn(m.rank, m.birth, self.restarts) for m in self.members))

    def finish(self, code: int, message: str = "", rank: int | None = None) -> None:
        """End the job; an incident that is open is reported as it stands."""
        if self.incident is not None:
            self.close()
        self.over = True
        self.act(ev.Finish(code, message, rank))

    def begin_incident(self, fault: Fault) -> Incident:
        """The incident that is open, or a new one that ``fault`` opens."""
        if self.incident is None:
            self.incidents += 1
            self.incident = Incident(self.incidents, self.terms.world, fault, committed=self.floor())
        return self.incident

    def close(self) -> None:
        """The incident is over: report it."""
        if self.incident is not None:
            self.act(ev.Report(self.incident.report()))
            self.incident = None
        for member in self.members:
            member.fired = None

    def floor(self) -> int:
        """The newest step that all ranks have committed."""
        return min(m.step(self.progress(m.rank)) for m in self.members)

    def left(self) -> int:
        """The number of ranks that have not ended."""
        return sum(not m.ended for m in self.members)

    def committed(self) -> bool:
        """Whether any rank has committed a step since the job's start."""
        newest = max(m.step(self.progress(m.rank)) for m in self.members)
        return self.life.first_step is not None and newest > self.life.first_step

    def owing(self) -> frozenset[int]:
        """Ranks that were interrupted and have not voted, though others have; the watchdog gives them a deadline."""
        if self.incident is None or self.life.planned or not any(m.vote for m in self.members):
            return frozenset()
        return frozenset(m.rank for m in self.members if m.vote is None and (m.joined or m.voted))
