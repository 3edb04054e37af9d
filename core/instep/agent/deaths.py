"""What a death means depends on when it happens: in set-up, in a block, between blocks, or at the end."""

from instep.agent import events as ev
from instep.agent.faults import describe, of_death, shell_code
from instep.agent.job import Job
from instep.agent.records import State
from instep.agent.recovery import open_incarnation, phase_of
from instep.agent.roster import Member
from instep.agent.rungs import job_rung, restart
from instep.model import Fault


def died(job: Job, member: Member, code: int | None) -> None:
    """A rank is dead: replace it where its step can be run again, else take the next rung."""
    progress = job.progress(member.rank)
    outside = member.outside(progress, job.life.released)
    hung = member.hung[0] if member.hung else None
    fault = of_death(member.rank, code, step=member.step(progress), at=member.evidence(job.now), hung=hung)
    if code == 0 and (outside or not job.life.live):
        _ended(job, member)
    elif not job.life.live:
        _in_setup(job, member, code, fault)
    elif outside:
        _outside(job, member, code, fault)
    else:
        _replace(job, member, fault)


def _replace(job: Job, member: Member, fault: Fault) -> None:
    phase = phase_of(job, member.rank) if job.incident is not None else None
    member.replace(job.progress(member.rank))
    if open_incarnation(job, fault, phase=phase):
        job.act(ev.Spawn(member.rank, member.birth, job.restarts))


def _ended(job: Job, member: Member) -> None:
    member.ended = True
    if not job.life.live and member.hello is None and any(m.hello for m in job.members):
        job.finish(1, f"rank {member.rank} ended without calling instep.init(), which other ranks did", member.rank)
    elif not job.life.live and any(m.joined for m in job.members):
        job.finish(1, f"rank {member.rank} ended without entering the block that other ranks are in", member.rank)
    elif all(m.ended for m in job.members):
        job.finish(0)


def _in_setup(job: Job, member: Member, code: int | None, fault: Fault) -> None:
    where = f"{fault.detail} in set-up, before all ranks had entered their first block"
    if job.plain:
        if (refused := job.budget.take()) is None:
            job.begin_incident(fault).attempt(job.life.incarnation, fault, None)
            restart(job, fault.detail)
        else:
            note = "" if code is not None and code > 0 else f" ({refused})"
            job.finish(shell_code(code), f"{describe(member.rank, code)}{note}", member.rank)
    elif code is not None and code > 0 and member.hung is None:
        job.finish(code, where, member.rank)
    else:
        job_rung(job, where, fault)


def _outside(job: Job, member: Member, code: int | None, fault: Fault) -> None:
    ending = job.progress(member.rank).state is State.ENDED or (code is not None and code > 0)
    if ending and job.terms.max_restarts == 0:
        job.finish(shell_code(code), f"{fault.detail} after its last block", member.rank)
        return
    job_rung(job, f"{fault.detail} outside of a recoverable block, where no step can be run again", fault)
