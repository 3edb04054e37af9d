"""The end of a block, in two phases: all are done, all know it while still donors, all leave."""

from instep.agent.job import Job
from instep.agent.roster import Member
from instep.messages import Closed, Closing, Done, Release


def done(job: Job, member: Member, message: Done) -> None:
    """A rank is at the end of its block. When all are, they are told. A message about a block that all have left is out of date."""
    if message.block <= job.life.released:
        return
    member.done = message
    if all(m.done is not None and m.done.block == message.block for m in job.members):
        job.send(Closing(block=message.block))


def closed(job: Job, member: Member, message: Closed) -> None:
    """A rank knows that all are done. When all know, nobody needs a donor any more: they leave the block, and an incident is over."""
    member.closed = True
    if not all(m.closed for m in job.members):
        return
    job.life.released = message.block
    for each in job.members:
        if each.done is not None:
            each.finished.append(each.done)
        each.done, each.closed = None, False
    job.send(Release(block=message.block))
    job.close()
