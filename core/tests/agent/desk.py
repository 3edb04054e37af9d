"""Drives a coordinator by hand: records in a list, time as a number, and words for what workers do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from instep.agent import events as ev
from instep.agent.coordinator import Coordinator, Terms
from instep.agent.records import Progress, State
from instep.messages import Closed, Committed, Done, Faulted, Hello, Injection, Joined, Message, Voted
from instep.model import Address, Fault, Plan, Status, Unrecoverable, Vote
from instep.plan import plan

A = TypeVar("A")
NOTHING = Progress(
    state=State.BORN, block=0, step=0, collectives=0, deliveries=0, frame=0, beat=0, waiting=0, sequence=0, joined=-1, operation=""
)


class Desk:
    """A job of ``world`` ranks. ``out`` holds the actions of the last event."""

    def __init__(
        self, world: int = 3, *, max_restarts: int = 0, injections: Sequence[Injection] = (), same: int = 3, recoveries: int = 5
    ) -> None:
        self.world, self.now = world, 100.0
        self.records = [NOTHING for _ in range(world)]
        self.births = [0] * world
        self.plans: list[list[Vote]] = []
        terms = Terms(
            world=world,
            secret="00",
            config={},
            max_restarts=max_restarts,
            injections=tuple(injections),
            same_fault=same,
            recoveries=recoveries,
        )
        self.coordinator = Coordinator(terms, planner=self.plan, progress=lambda rank: self.records[rank])
        self.out = self.coordinator.start(self.now)

    def plan(self, votes: Sequence[Vote]) -> Plan | Unrecoverable:
        self.plans.append(list(votes))
        return plan(votes)

    @property
    def incarnation(self) -> int:
        return self.coordinator.job.life.incarnation

    def handle(self, event: ev.Event) -> "Desk":
        self.out = self.coordinator.handle(event, self.now)
        for spawn in self.of(ev.Spawn):
            self.births[spawn.rank] = spawn.birth
        return self

    def of(self, kind: type[A]) -> list[A]:
        """The actions of one kind in the last answer."""
        return [action for action in self.out if isinstance(action, kind)]

    def sent(self, kind: type[A]) -> dict[int, A]:
        """Messages of one kind in the last answer, by rank."""
        return {a.rank: a.message for a in self.of(ev.Send) if isinstance(a.message, kind)}

    def finish(self) -> ev.Finish:
        (finish,) = self.of(ev.Finish)
        return finish

    # ---- what workers do

    def at(self, rank: int, state: State, step: int | None = None, *, block: int | None = None) -> "Desk":
        record = self.records[rank]
        self.records[rank] = replace(record, state=state, step=record.step if step is None else step)
        if block is not None:
            self.records[rank] = replace(self.records[rank], block=block)
        return self

    def everyone(self, state: State, step: int | None = None) -> "Desk":
        for rank in range(self.world):
            self.at(rank, state, step)
        return self

    def say(self, rank: int, message: Message) -> "Desk":
        return self.handle(ev.Received(rank, self.births[rank], message))

    def hello(self, rank: int) -> "Desk":
        self.at(rank, State.SETUP)
        return self.say(rank, Hello(rank=rank, birth=self.births[rank], address=self.address(rank)))

    def joined(self, rank: int, step: int = 0, incarnation: int | None = None) -> "Desk":
        number = self.incarnation if incarnation is None else incarnation
        self.at(rank, State.STEP, step)
        return self.say(rank, Joined(incarnation=number, block=0, step=step, at=self.now))

    def committed(self, rank: int, step: int, incarnation: int | None = None) -> "Desk":
        number = self.incarnation if incarnation is None else incarnation
        self.at(rank, State.STEP, step)
        return self.say(rank, Committed(incarnation=number, step=step, at=self.now))

    def vote(self, rank: int, step: int = 0, status: Status = Status.CLEAN, incarnation: int | None = None) -> "Desk":
        vote = Vote(
            rank=rank,
            birth=self.births[rank],
            incarnation=self.incarnation if incarnation is None else incarnation,
            block=0,
            step=step,
            status=status,
            groups=(),
            address=self.address(rank),
            shards={"world": tuple(range(self.world))},
        )
        return self.say(rank, Voted(vote=vote))

    def fault(self, rank: int, signature: str = "e", phase: str | None = None, incarnation: int | None = None) -> "Desk":
        fault = Fault(kind="exception", ranks=(rank,), detail="boom", detected_by="worker", at=self.now, signature=signature)
        number = self.incarnation if incarnation is None else incarnation
        return self.say(rank, Faulted(incarnation=number, fault=fault, phase=phase))

    def dies(self, rank: int, code: int | None = -9) -> "Desk":
        return self.handle(ev.Died(rank, self.births[rank], code))

    def done(self, rank: int, step: int, incarnation: int | None = None) -> "Desk":
        self.at(rank, State.DONE, step)
        number = self.incarnation if incarnation is None else incarnation
        return self.say(rank, Done(incarnation=number, block=0, step=step, value=f"result {rank}"))

    def closed(self, rank: int) -> "Desk":
        return self.say(rank, Closed(incarnation=self.incarnation, block=0))

    # ---- longer stories

    def greeted(self) -> "Desk":
        for rank in range(self.world):
            self.hello(rank)
        return self

    def live(self, step: int = 0) -> "Desk":
        """All ranks in their block, ``step`` steps committed."""
        self.greeted()
        for rank in range(self.world):
            self.joined(rank)
        return self.everyone(State.STEP, step)

    def replaced(self, rank: int, step: int) -> "Desk":
        """After the death of ``rank``: the replacement says hello, all vote, and all are in step."""
        self.hello(rank)
        for each in range(self.world):
            self.vote(each, step=0 if each == rank else step, status=Status.FRESH if each == rank else Status.CLEAN)
        for each in range(self.world):
            self.joined(each, step)
        return self

    def stepped(self, step: int) -> "Desk":
        """All ranks commit, so that ``step`` steps are committed."""
        for rank in range(self.world):
            self.committed(rank, step)
        return self

    def address(self, rank: int) -> Address:
        return Address(rank=rank, birth=self.births[rank], host="127.0.0.1")
