"""START HERE: the lifecycle of instep, one method a hook. A plugin is a class that inherits ``Plugin``.

The loop, with every hook in its place::

    environment()                        # in the agent, before any process: variables for the workers
    start(job)                           # once, before the first step
    begin(recovery)                      # every rank, before the first step: go on from an earlier run
    announce(groups)                     # what peers must know to connect: at the start, for a new group, with a vote
    while training:
        committed(step)                  # after each commit
        keep(step, book)                 # copies of what no other rank holds: after each commit, at the start, after a recovery
        detect()                         # at each commit, and at each tick of the agent
        --- on a fault ---
        quiesce(interruption)            # every rank: fail pending work, close transports
        plan(votes)                      # in the agent: who is lost, who donates, which step
        reinit_comms(request)            # every rank: communicators from the address book
        restore_state(recovery)          # donors send, replacements receive
        resume_data(recovery)            # the very next batch of the run
        verify(recovery)                 # same step, same digests
        report(incident)                 # in the agent: phase, plugin, seconds, bytes
    close()

Fields of the class are its settings (table ``[plugins.NAME]``), methods marked ``@instep.hookimpl`` are its hooks.
What hooks are given stands in ``instep.arguments``, and can be imported from here.
"""

from collections.abc import Mapping, Sequence

import pluggy
from pydantic import BaseModel, ConfigDict

from instep.arguments import CommsRequest, Communicator, Holding, Interruption, Job, Kept, Recovery, SharedState
from instep.model import AddressBook, Fault, Group, IncidentReport, Json, Plan, Receipt, Unrecoverable, Vote

__all__ = [
    "HOOKS",
    "HOOK_API",
    "CommsRequest",
    "Communicator",
    "Holding",
    "Interruption",
    "Job",
    "Kept",
    "Plugin",
    "Recovery",
    "SharedState",
    "hookimpl",
    "hookspec",
]

HOOK_API = 1
hookspec = pluggy.HookspecMarker("instep")
hookimpl = pluggy.HookimplMarker("instep")


class Plugin(BaseModel):
    """Base of all plugins, and the specification of every hook. Fields are settings: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @hookspec
    def environment(self) -> "Mapping[str, str] | None":
        """Give workers the variables that libraries read when they are loaded. What the shell has set wins.

        When: once for each job, before the fork server or any worker is there.
        Runs on: the agent.
        Return: values by the names of variables, or None.
        Combine: all answers are merged; two plugins with two values for one name are an error.
        If it raises: the job does not start.
        """

    @hookspec
    def start(self, job: Job) -> "Mapping[str, int] | None":
        """Open what lives as long as the process, before the first step.

        When: once for each process, inside ``instep.init()``.
        Runs on: every rank, in the main thread.
        Return: ports it listens on, by name, for the address book; or None.
        Combine: all answers are merged; two plugins with one port name are an error.
        If it raises: the rank's start fails.
        """

    @hookspec(firstresult=True)
    def begin(self, recovery: Recovery) -> int | None:
        """Bring every rank to where an earlier run had got, shared state and record, before the job's first step.

        When: at the first block of a job, with everything protected and ``recovery.plan`` naming the script's first step; no fault.
        Runs on: every rank, in the main thread; never in a replacement.
        Return: the number of steps done by then, the same on every rank; None to begin where the script does.
        Combine: first answer.
        If it raises: the rank's start fails.
        """

    @hookspec
    def committed(self, step: int) -> None:
        """Follow a commit: buddy copies, cursors.

        When: after each commit, with the number of steps committed.
        Runs on: every rank, in the main thread; keep it cheap.
        Return: nothing.
        Combine: all run.
        If it raises: logged once; training goes on.
        """

    @hookspec
    def keep(self, step: int, book: AddressBook) -> Kept | None:
        """Put a copy of the state of this step beside the live one, for the day on which nobody holds it; see ``Job.holding``.

        When: where a rank may have to return to: as a block begins, after each commit, at a recovery's end. ``book``: where peers are.
        Runs on: every rank, in the main thread; start what takes long, core waits for it before this rank's next barrier.
        Return: what is kept, or None. Who keeps nothing as a block begins is not asked after its commits.
        Combine: all run; copies are merged into the vote.
        If it raises: a fault of this rank, at its next barrier.
        """

    @hookspec
    def detect(self) -> Fault | None:
        """Look for a fault that nobody reported.

        When: at each commit's entry in a worker, at each tick in the agent.
        Runs on: every rank and the agent.
        Return: a fault, or None.
        Combine: every fault counts.
        If it raises: a fault of kind ``plugin``.
        """

    @hookspec
    def announce(self, groups: Sequence[Group]) -> "Mapping[str, Json] | None":
        """Tell peers what they need to connect these groups with this rank. The next ``reinit_comms`` connects them, in this order.

        When: before groups are connected: at the start, for a new group, and with each vote.
        Runs on: every rank, in the main thread.
        Return: notes for the peers' address book, or None.
        Combine: all run; notes are kept by plugin.
        If it raises: the start or the attempt fails.
        """

    @hookspec
    def quiesce(self, interruption: Interruption) -> None:
        """Fail pending work and close transports of older incarnations. Must be safe to repeat.

        When: on the notice of a fault, again until the main thread unwinds, and a last time while acknowledging.
        Runs on: every rank, in the control thread; the last call in the main thread.
        Return: nothing.
        Combine: all run.
        If it raises: the attempt fails.
        """

    @hookspec(firstresult=True)
    def plan(self, votes: Sequence[Vote]) -> "Plan | Unrecoverable | None":
        """Decide who is lost, who donates and which step goes on. Pure and total.

        When: all ranks of an incarnation have voted.
        Runs on: the agent.
        Return: a plan, or why there is none; None for "not mine".
        Combine: first answer; core's own comes last.
        If it raises: the job takes the next rung.
        """

    @hookspec(firstresult=True)
    def reinit_comms(self, request: CommsRequest) -> "Sequence[Communicator] | None":
        """Connect process groups from the address book.

        When: for each backend at the start, for a new group, and in a recovery after all ranks acknowledged.
        Runs on: every rank, in the main thread.
        Return: one communicator for each group of the request, in order; None for "not my backend".
        Combine: first answer.
        If it raises: all ranks go to the next attempt.
        """

    @hookspec(firstresult=True)
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        """Bring shared state to the plan's step on every rank whose role is ``restore``.

        When: in a recovery, after the communicators are up.
        Runs on: every rank, in the main thread.
        Return: a receipt; None for "not mine", decided from the plan alone.
        Combine: first answer.
        If it raises: all ranks go to the next attempt.
        """

    @hookspec(firstresult=True)
    def resume_data(self, recovery: Recovery) -> Receipt | None:
        """Make the loaders deliver the very next batch of the run.

        When: in a recovery, after private state was reloaded from the record.
        Runs on: every rank, in the main thread.
        Return: a receipt; None for "not mine".
        Combine: first answer; core's own comes last and covers all other loaders.
        If it raises: all ranks go to the next attempt.
        """

    @hookspec
    def verify(self, recovery: Recovery) -> Receipt | None:
        """Prove that all ranks stand at the same step with the same bytes.

        When: in a recovery, last.
        Runs on: every rank, in the main thread.
        Return: a receipt, or None.
        Combine: all run and all must agree.
        If it raises: all ranks go to the next attempt.
        """

    @hookspec
    def report(self, incident: IncidentReport) -> None:
        """Observe a finished incident.

        When: all ranks have committed again.
        Runs on: the agent.
        Return: nothing.
        Combine: all run.
        If it raises: logged; an observer never fails a recovery.
        """

    @hookspec
    def close(self) -> None:
        """Give back what ``start`` opened.

        When: once, when the process ends or the session is closed.
        Runs on: every rank.
        Return: nothing.
        Combine: all run, in reverse order.
        If it raises: logged.
        """


HOOKS: tuple[str, ...] = (
    "environment",
    "start",
    "begin",
    "announce",
    "committed",
    "keep",
    "detect",
    "quiesce",
    "plan",
    "reinit_comms",
    "restore_state",
    "resume_data",
    "verify",
    "report",
    "close",
)
