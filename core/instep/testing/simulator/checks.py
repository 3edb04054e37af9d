"""What must hold after every step of a simulated job, whatever goes wrong in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from instep.agent import events as ev
from instep.model import IncidentReport, Plan, Role, Status, Unrecoverable, Vote

if TYPE_CHECKING:
    from instep.testing.simulator.network import Peer
    from instep.testing.simulator.rank import Rank
    from instep.testing.simulator.world import World

PATIENCE = 120.0
"""Virtual seconds within which a job is well again, or ends with a message, after the last trouble."""
STORM = 4
"""Incarnations that one trouble may open; more is a storm."""


def _befell(*where: str) -> Callable[["World"], bool]:
    return lambda world: any(place in where for _, place in world.happened)


def _was(*kinds: str) -> Callable[["World"], bool]:
    return lambda world: any(trouble.kind in kinds for trouble, _ in world.happened)


_REASONS: tuple[tuple[str, Callable[["World"], bool]], ...] = (
    ("in set-up", _befell("setup")),
    ("exited with code", _befell("setup")),
    ("outside of a recoverable block", _befell("outside")),
    ("after its last block", _befell("outside")),
    ("no rank holds a complete step", lambda world: len(world.happened) > 1),
    ("the fork server died", _was("server")),
    ("all ranks wait for each other", _was("hang", "spin", "stop")),
    ("(--max-restarts", _befell("setup")),
    ("(all of --max-restarts", _befell("setup")),
    ("times on rank", lambda world: len(world.happened) > 2),
    # A death in a recovery opens two incarnations: its peers often tell of the transfer that broke before the agent sees the death.
    ("recoveries in a row", lambda world: sum(trouble.kind not in ("pause", "slow") for trouble, _ in world.happened) > 2),
)
"""What a job may say when it gives up on a good line, and what must have happened for it."""


class Violation(AssertionError):  # noqa: N818 - the finding of a test
    """Something that must never happen did; the message says what, and how to see it again."""


class Checks:
    """Follows one job. Every method raises ``Violation``."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.reports: list[IncidentReport] = []
        self.found: Violation | None = None
        self.begin_life()

    def begin_life(self) -> None:
        """The job starts from its beginning."""
        self.plans: dict[int, Plan] = {}
        self._members: dict[int, dict[int, int]] = {}
        self._newest = dict.fromkeys(range(self._world.schedule.world), 0)
        self.floor = 0

    def never(self, what: str) -> None:
        """Fail. The world raises what was ``found`` itself, since core may catch what is raised in a rank."""
        world = self._world
        again = f"python -m instep.testing.simulator --seed {world.schedule.seed} --trace"
        self.found = self.found or Violation(f"{what} (at {world.clock.now:.4f} s); see it again: {again}")
        raise self.found

    def acts(self, peer: "Peer", incarnation: int) -> None:
        """One membership per incarnation: a second birth of a rank never acts in it."""
        birth = self._members.setdefault(incarnation, {}).setdefault(peer.rank, peer.birth)
        if birth != peer.birth:
            self.never(f"births {birth} and {peer.birth} of rank {peer.rank} both act in incarnation {incarnation}")

    def met(self, incarnation: int, births: Mapping[int, int]) -> None:
        """A collective is complete: with the members of its incarnation alone."""
        for rank, birth in births.items():
            have = self._members.setdefault(incarnation, {}).setdefault(rank, birth)
            if have != birth:
                self.never(f"birth {birth} of rank {rank} met birth {have}'s peers in incarnation {incarnation}")

    def quiesced(self, rank: "Rank", incarnation: int) -> None:
        """Connections are closed: by a rank that has not voted yet, and none that peers made for this incarnation or a newer one."""
        if rank.board.acknowledged >= incarnation:
            self.never(f"rank {rank.rank} quiesces for incarnation {incarnation} after it has voted in it")
        for newer, meetings in self._world.network.meetings.items():
            if newer >= incarnation and meetings:
                self.never(f"rank {rank.rank} quiesces for incarnation {incarnation} when peers already connect {newer}")

    def planned(self, votes: Sequence[Vote], plan: Plan | Unrecoverable, again: Plan | Unrecoverable) -> None:
        """A plan: of votes of one incarnation and of all ranks, whatever their order, and no committed step is lost."""
        world = self._world
        if plan != again:
            self.never(f"the plan depends on the order of votes: {plan} and {again}")
        newest = world.agent.coordinator.job.life.incarnation
        if {v.incarnation for v in votes} != {newest} or sorted(v.rank for v in votes) != list(world.everyone):
            self.never(f"a plan for incarnation {newest} from votes {[(v.rank, v.incarnation) for v in votes]}")
        if isinstance(plan, Unrecoverable):
            self._given_up(votes, plan.why)
        elif plan.step < self.floor:
            self.never(f"incarnation {plan.incarnation} goes on at step {plan.step}, though all ranks had committed {self.floor}")

    def _given_up(self, votes: Sequence[Vote], why: str) -> None:
        holding = [v.rank for v in votes if v.status not in (Status.FRESH, Status.TORN)]
        if holding and not self._world.schedule.lossy:
            self.never(f"no plan though ranks {holding} hold a complete step: {why}")

    def adopted(self, rank: "Rank", plan: Plan) -> None:
        """A rank begins an attempt: with the plan that all others have."""
        self.acts(rank.process, plan.incarnation)
        if self.plans.setdefault(plan.incarnation, plan) != plan:
            self.never(f"rank {rank.rank} has another plan of incarnation {plan.incarnation} than other ranks")
        if plan.book.addresses[rank.rank].birth != rank.process.birth:
            self.never(f"birth {rank.process.birth} of rank {rank.rank} follows a plan made for another birth")

        keeps = plan.roles[rank.rank] is Role.KEEP
        if keeps and (rank.standing.step != plan.step or rank.shared != self._world.reference.shared[plan.step]):
            self.never(
                f"rank {rank.rank} ({rank.standing.status.value}, step {rank.standing.step}) is to keep what is not step {plan.step}"
            )

    def donates(self, rank: "Rank", plan: Plan) -> None:
        """No rank donates state that is not that of the plan's step."""
        if rank.shared != self._world.reference.shared[plan.step] or rank.standing.status is not Status.CLEAN:
            self.never(f"rank {rank.rank} ({rank.standing.status.value}, step {rank.standing.step}) donates a wrong step {plan.step}")

    def committed(self, rank: "Rank") -> None:
        """A step is complete on a rank: bit for bit, and not on behalf of an incarnation that it has left."""
        board, step = rank.board, rank.standing.step
        self._right(rank, f"committed step {step}")
        if board.acknowledged > board.current:
            plan = board.plan
            if plan is None or plan.incarnation != board.acknowledged or plan.roles[rank.rank] is not Role.ROLL_FORWARD:
                self.never(f"rank {rank.rank} committed step {step} after its vote in incarnation {board.acknowledged}, without a plan to")
        self._holds(rank.rank, step)

    def joined(self, rank: "Rank", plan: Plan) -> None:
        """A rank is in step: with the state of the run without faults, and in the newest incarnation it knows of."""
        self.acts(rank.process, plan.incarnation)
        self._right(rank, f"joined incarnation {plan.incarnation}")
        if rank.standing.step != plan.step:
            self.never(f"rank {rank.rank} joined at step {rank.standing.step}, not {plan.step}")
        self._holds(rank.rank, plan.step)

    def left(self, rank: "Rank", step: int) -> None:
        """A rank leaves a block: at its last step, and all ranks have committed it."""
        self._right(rank, "left a block")
        if step not in self._world.schedule.blocks or self.floor < step:
            self.never(f"rank {rank.rank} left a block at step {step}, all ranks have committed {self.floor}")

    def reported(self, report: IncidentReport) -> None:
        """An incident is over: no step was lost that all had committed, unless the whole job started again."""
        self.reports.append(report)
        if report.scope == "in_process" and report.steps_lost:
            self.never(f"incident {report.incident} lost {report.steps_lost} steps in process")

    def in_time(self) -> None:
        """Recovery, or an end with a name, comes in bounded time, and incarnations are no storm."""
        world = self._world
        if world.clock.now > world.last_trouble + PATIENCE:
            if world.agent.coordinator.job.plain and world.schedule.lossy:
                world.agent.end = ev.Finish(1, "no greeting was heard, so the job passes for a plain script, and nobody watches those")
                return
            self.never(f"neither well nor given up {PATIENCE:.0f} s after the last trouble: {world.picture()}")
        opened = world.agent.coordinator.job.life.incarnation
        if not world.schedule.lossy and opened > STORM * (1 + len(world.schedule.troubles)):
            self.never(f"{opened} incarnations for {len(world.schedule.troubles)} troubles")

    def ended(self) -> None:
        """The job is over: whole, or with the name of what ended it."""
        world, end = self._world, self._world.agent.end
        if end is None:
            self.never(f"nothing happens any more: {world.picture()}")
        elif end.code == 0 and self.floor != world.schedule.steps:
            self.never(f"the job ended well at step {self.floor} of {world.schedule.steps}")
        elif end.code != 0 and not end.message:
            self.never(f"the job ended with code {end.code} and without a word")
        elif end.code != 0 and not world.schedule.lossy and not any(says in end.message and holds(world) for says, holds in _REASONS):
            self.never(f"the job ended without a good reason: {end.message}")

    def _holds(self, rank: int, step: int) -> None:
        self._newest[rank] = max(self._newest[rank], step)
        self.floor = max(self.floor, min(self._newest.values()))

    def _right(self, rank: "Rank", when: str) -> None:
        reference, step = self._world.reference, rank.standing.step
        if rank.shared != reference.shared[step]:
            self.never(f"rank {rank.rank} {when}: its shared state is not that of step {step} of the run without faults")
        if rank.state.private.value != reference.private[step][rank.rank]:
            self.never(f"rank {rank.rank} {when}: its private state is not that of step {step} of the run without faults")
