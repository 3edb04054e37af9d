"""The last rungs: the whole job from its start, or an end that says why each rung failed."""

from instep.agent import events as ev
from instep.agent.job import Job
from instep.model import Fault

NO_CHECKPOINT = (
    "none is configured: plugins.state_replica.checkpoint = {dir = ..., every = STEPS} keeps some, "
    "session.on_checkpoint loads the script's own"
)


def job_rung(job: Job, why: str, fault: Fault, *, checkpoint: str = "") -> None:
    """Recovery in process is not possible because of ``why``: start the whole job again if that is allowed, else give up.

    ``checkpoint`` is why none could be loaded, if any was looked for.
    """
    lost = job.committed()
    refused = job.budget.take() if lost or job.plain else job.budget.take_free()
    incident = job.begin_incident(fault)
    if not incident.attempts:
        incident.attempt(job.life.incarnation, fault, None)
    if refused is None:
        restart(job, why)
        return
    rungs = [f"in process: {why}", f"checkpoint: {checkpoint or NO_CHECKPOINT}", f"whole job from its start: {refused}"]
    job.finish(70, "gave up, no rung is left\n  " + "\n  ".join(rungs), fault.ranks[0] if len(fault.ranks) == 1 else None)


def restart(job: Job, why: str) -> None:
    """Start the whole job again."""
    if job.incident is not None:
        job.incident.job()
    job.clearing = True
    job.log(f"starting the whole job again: {why}")
    job.act(ev.Restart(why))
