"""A recovery in process: a fault opens an incarnation, all vote, the plan goes out, all join, all commit."""

from instep.agent import events as ev
from instep.agent.job import Job
from instep.agent.records import State
from instep.agent.roster import Member
from instep.agent.rungs import job_rung
from instep.messages import Committed, Faulted, Interrupt, Joined, Planned, Voted
from instep.model import Fault, Unrecoverable

COMMS_GRACE = 0.05
"""Seconds that a communication error waits for the notice of the death behind it."""


def open_incarnation(job: Job, fault: Fault, *, phase: str | None = None) -> bool:
    """A fault makes everything older out of date: all ranks must be quiet and vote. False when that cannot be.

    It cannot when the circuit breaker ends the job, or when a rank has ended already: then the next rung is taken.

    ``phase`` is where the recovery that was under way failed.
    """
    if gone := [m.rank for m in job.members if m.ended]:  # it will never vote
        job_rung(job, f"{fault.detail}, and rank {gone[0]} had already ended", fault)
        return False
    life, floor = job.life, job.floor()
    incident = job.begin_incident(fault)
    life.incarnation += 1
    incident.attempt(life.incarnation, fault, phase)
    if why := life.breaker.fault(fault, floor):
        job.finish(70, f"gave up: {why}", fault.ranks[0] if fault.ranks else None)
        return False
    life.planned, life.held = False, None
    life.gathers.clear()
    for member in job.members:
        member.vote = member.done = member.in_step = None
        member.closed = False
    job.send(Interrupt(incarnation=life.incarnation, fault=fault))
    job.log(f"incident {incident.number}, attempt {len(incident.attempts)}: {fault.detail}")
    return True


def phase_of(job: Job, rank: int) -> str | None:
    """The phase of a recovery that a rank is in, as its record tells."""
    progress = job.progress(rank)
    return progress.operation or "recovery" if progress.state is State.RECOVERY else None


def faulted(job: Job, member: Member, message: Faulted) -> None:
    """A worker saw a fault. Communication errors, and faults while others are still setting up, wait a moment.

    A rank that was interrupted and has not voted yet fails because of the fault that is known: its vote is all that is needed.
    """
    fault = message.fault
    if member.fired is not None:
        fault = fault.model_copy(update={"at": member.fired})
        message = message.model_copy(update={"fault": fault})
        member.fired = None
    if job.incident is not None and not job.life.planned and member.vote is None and message.phase is None:
        return
    if not job.life.live:
        if job.life.held is None:
            job.life.held = (member.rank, message, float("inf"))
    elif fault.signature.startswith("comms"):
        if job.life.held is None:
            job.life.held = (member.rank, message, job.now + COMMS_GRACE)
            job.act(ev.Wake(COMMS_GRACE))
    else:
        open_incarnation(job, fault, phase=message.phase)


def release_held(job: Job) -> None:
    """Let a fault that was held back act, if nothing explained it meanwhile and its time has come."""
    if job.life.held is None or not job.life.live:
        return
    _, message, until = job.life.held
    if message.incarnation != job.life.incarnation:
        job.life.held = None
    elif job.now >= until or until == float("inf"):
        job.life.held = None
        open_incarnation(job, message.fault, phase=message.phase)
    else:
        job.act(ev.Wake(until - job.now))


def voted(job: Job, member: Member, message: Voted) -> None:
    """A rank is quiet. When all are, the plan is made, once an incarnation."""
    member.vote, member.voted = message.vote, True
    votes = [m.vote for m in job.members if m.vote is not None]
    if job.incident is None or job.life.planned or len(votes) < job.terms.world:
        return
    job.life.planned = True
    job.incident.quiet(job.floor())
    plan = job.planner(votes)
    if isinstance(plan, Unrecoverable):
        job_rung(job, f"no plan in process: {plan.why}", job.incident.fault, checkpoint=plan.checkpoint)
        return
    job.incident.planned(plan)
    source = f" from checkpoint {plan.checkpoint}" if plan.checkpoint else ""
    skipped = f"; skipped: {'; '.join(plan.skipped)}" if plan.skipped else ""
    job.log(f"incident {job.incident.number}: all ranks are quiet, going on at step {plan.step}{source}{skipped}")
    job.send(Planned(plan=plan))


def joined(job: Job, member: Member, message: Joined) -> None:
    """A rank is in step. When all are for the first time, the job is live."""
    if ended := [m for m in job.members if m.ended and not m.joined]:
        job.finish(1, f"rank {ended[0].rank} ended without entering the block that rank {member.rank} is in", ended[0].rank)
        return
    member.joined, member.in_step = True, message.incarnation
    if job.incident is not None and job.incident.joined(member.rank, message):
        job.life.breaker.in_step()
        job.log(f"incident {job.incident.number}: all ranks are in step at step {message.step}")
    if not job.life.live and all(m.joined for m in job.members):
        job.life.live = True
        job.life.first_step = message.step
        release_held(job)


def committed(job: Job, member: Member, message: Committed) -> None:
    """A rank committed for the first time since it joined; the incident ends with the last of them."""
    if job.incident is None:
        job.budget.progress()
    elif job.incident.committed_by(member.rank, message.at):
        job.budget.progress()
        job.close()
