"""The coordinator: every decision about a job, as a state machine without clock, sockets or processes.

Events go in, actions come out (``events.py``); the agent carries them out, and so does the simulator. A fault in a block goes from
``deaths.died`` or ``recovery.faulted`` to ``recovery.open_incarnation``, and from there through the functions of ``recovery`` in order.
"""

from collections.abc import Callable
from typing import Literal

from instep.agent import blocks, deaths, recovery, startup
from instep.agent import events as ev
from instep.agent.job import Job, Planner, Terms
from instep.agent.records import Progress
from instep.agent.roster import Member
from instep.agent.rungs import job_rung
from instep.messages import Closed, Committed, Done, Fatal, Faulted, Fired, Gather, Hello, Joined, Message, Once, Voted
from instep.model import Fault

__all__ = ["Coordinator", "Planner", "Terms"]


class Coordinator:
    """Leads one job. ``planner`` decides on votes, ``progress`` reads a rank's record; both are given, so that all else is pure."""

    def __init__(self, terms: Terms, *, planner: Planner, progress: Callable[[int], Progress]) -> None:
        self.job = Job(terms, planner=planner, progress=progress)

    def start(self, now: float) -> list[ev.Action]:
        """Start every rank."""
        self.job.now = now
        self.job.begin()
        return self.job.take()

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """What to do about an event at ``now`` (monotonic seconds), in order."""
        job = self.job
        job.now = now
        if job.over:
            return []
        if not job.clearing:
            self._dispatch(event)
        elif isinstance(event, ev.Cleared):
            job.clearing = False
            job.restarts += 1
            job.begin()
        return job.take()

    def _dispatch(self, event: ev.Event) -> None:
        job = self.job
        match event:
            case ev.Born() | ev.Received() | ev.Died() | ev.Hung():
                member = job.members[event.rank]
                if event.birth == member.birth and not member.ended:
                    self._of_member(member, event)
            case ev.Stuck(table):
                detail = "all ranks wait for each other and nothing moves"
                job_rung(job, f"{detail}:\n{table}", self._of_all("hang", detail, "watchdog"))
            case ev.ServerDied(why):
                job_rung(job, why, self._of_all("exit", why, "agent"))
            case ev.Detected(fault) if job.life.live and not any(m.ended for m in job.members):
                recovery.open_incarnation(job, fault)
            case ev.Woken():
                recovery.release_held(job)

    def _of_all(self, kind: Literal["hang", "exit"], detail: str, by: str) -> Fault:
        everyone = tuple(range(self.job.terms.world))
        return Fault(kind=kind, ranks=everyone, detail=detail, detected_by=by, at=self.job.now)

    def _of_member(self, member: Member, event: ev.Born | ev.Received | ev.Died | ev.Hung) -> None:
        match event:
            case ev.Born():
                startup.born(self.job, member)
            case ev.Died():
                deaths.died(self.job, member, event.code)
            case ev.Hung():
                member.hung = event.why, self.job.now
                self.job.act(ev.Kill(member.rank, member.birth, event.why, event.dump))
            case ev.Received():
                self._message(member, event.message)

    def _message(self, member: Member, message: Message) -> None:
        job = self.job
        match message:
            case Hello() if member.hello is None:
                startup.hello(job, member, message)
            case Fired():
                job.injections = [i for i in job.injections if i.id != message.id]
                member.fired = message.at
            case Once():
                member.once[message.index] = message.value
            case Fatal():
                job.finish(message.code, message.message, member.rank)
            case Voted() if message.vote.incarnation == job.life.incarnation:
                recovery.voted(job, member, message)
            case Gather() | Joined() | Committed() | Faulted() | Done() | Closed() if message.incarnation == job.life.incarnation:
                self._of_incarnation(member, message)

    def _of_incarnation(self, member: Member, message: Gather | Joined | Committed | Faulted | Done | Closed) -> None:
        job = self.job
        match message:
            case Gather():
                startup.gather(job, message)
            case Joined():
                recovery.joined(job, member, message)
            case Committed():
                recovery.committed(job, member, message)
            case Faulted():
                recovery.faulted(job, member, message)
            case Done():
                blocks.done(job, member, message)
            case Closed():
                blocks.closed(job, member, message)
