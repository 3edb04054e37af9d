"""From the first process to the first step: greetings, the first address book, and new process groups."""

from instep.agent.job import Job
from instep.agent.roster import Member, ranks
from instep.messages import Gather, Gathered, Hello, Interrupt
from instep.model import AddressBook


def born(job: Job, member: Member) -> None:
    """A process exists. Nothing more can be seen of a plain script, so its restart is over when all do."""
    member.born = True
    if job.plain and job.incident is not None and all(m.born for m in job.members):
        job.incident.resumed(job.now)
        job.close()


def hello(job: Job, member: Member, message: Hello) -> None:
    """A worker called ``instep.init``: the first ones wait for each other, a replacement is told about the recovery at once."""
    member.hello = message
    job.greeted = True
    if job.life.live:
        _welcome(job, member, None)
        if job.incident is not None:
            job.send(Interrupt(incarnation=job.life.incarnation, fault=job.incident.attempts[-1].fault), member)
        return
    if early := [m for m in job.members if m.ended and m.hello is None]:
        why = f"{ranks(early)} ended without calling instep.init(), which rank {member.rank} did; every rank of the job must call it"
        job.finish(1, why, early[0].rank)
        return
    hellos = [m.hello for m in job.members if m.hello is not None]
    if len(hellos) == job.terms.world:
        book = AddressBook(incarnation=0, addresses=tuple(h.address for h in hellos), notes=tuple(h.notes for h in hellos))
        for other in job.members:
            _welcome(job, other, book)


def gather(job: Job, message: Gather) -> None:
    """Members of a new process group exchange notes; answered when the last of them has asked."""
    asked = job.life.gathers.setdefault(message.key, {})
    asked[message.rank] = message.notes
    if all(rank in asked for rank in message.members):
        del job.life.gathers[message.key]
        notes = tuple(asked[rank] for rank in message.members)
        answer = Gathered(incarnation=job.life.incarnation, key=message.key, notes=notes)
        job.send(answer, *(job.members[rank] for rank in message.members))


def _welcome(job: Job, member: Member, book: AddressBook | None) -> None:
    terms = job.terms
    job.send(member.welcome(job.life.incarnation, book, config=terms.config, secret=terms.secret, injections=job.injections), member)
