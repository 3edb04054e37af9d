"""One incident, from its first fault until all ranks have committed again."""

from dataclasses import dataclass, field

from instep.messages import Joined
from instep.model import Attempt, Fault, IncidentReport, Plan, Receipt, Scope


@dataclass
class Incident:
    """What is known about an incident that is not over. ``committed`` is the newest step all ranks had committed before it."""

    number: int
    world: int
    fault: Fault
    committed: int
    scope: Scope = "in_process"
    attempts: list[Attempt] = field(default_factory=list)
    step: int | None = None
    lost: int = 0
    _receipts: list[Receipt] = field(default_factory=list)
    _joined: dict[int, float] = field(default_factory=dict)
    _commits: dict[int, float] = field(default_factory=dict)

    def attempt(self, incarnation: int, fault: Fault, failed_phase: str | None) -> None:
        """A fault opens the next attempt, and ends the one before it in ``failed_phase``."""
        if self.attempts:
            last = self.attempts.pop()
            self.attempts.append(last.model_copy(update={"failed_phase": last.failed_phase or failed_phase}))
        self.attempts.append(Attempt(incarnation=incarnation, fault=fault))
        self._joined.clear()
        self._commits.clear()

    def quiet(self, committed: int) -> None:
        """All ranks are quiet, and ``committed`` is the newest step that all of them had committed by then."""
        self.committed = max(self.committed, committed)

    def planned(self, plan: Plan) -> None:
        """The ranks go on at the plan's step, or at the one that the checkpoint turns out to be of: they tell when they join.

        What was lost once is lost, whatever a later attempt can do without a checkpoint.
        """
        if plan.checkpoint:
            self.scope, self.step = "checkpoint", None
        else:
            self.step = plan.step
            self.lost = max(self.lost, self.committed - plan.step)

    def job(self) -> None:
        """The whole job starts again: survivors lose their processes."""
        self.scope, self.step = "job", None
        self._joined.clear()
        self._commits.clear()

    def joined(self, rank: int, message: Joined) -> bool:
        """A rank is in step; true once all are."""
        self._joined[rank] = message.at
        self._receipts += message.receipts
        if self.scope != "in_process":
            self.step = message.step if self.step is None else min(self.step, message.step)
        return self.recovered

    @property
    def recovered(self) -> bool:
        """Whether all ranks are in step again."""
        return len(self._joined) == self.world

    def resumed(self, at: float) -> None:
        """All ranks run again, as far as can be seen of a script that does not use instep."""
        self._joined = dict.fromkeys(range(self.world), at)

    def committed_by(self, rank: int, at: float) -> bool:
        """A rank has committed; true once all have."""
        self._commits[rank] = at
        return len(self._commits) == self.world

    def report(self) -> IncidentReport:
        """The incident as it stands; what never happened is ``None``."""
        proven = {r.rank for r in self._receipts if r.phase == "verify" and r.verified}
        step = self.committed if self.step is None else self.step
        return IncidentReport(
            incident=self.number,
            fault=self.fault,
            attempts=tuple(self.attempts),
            scope=self.scope,
            step=step,
            steps_lost=max(self.lost, self.committed - step),
            phases=tuple(self._receipts),
            seconds_to_resume=self._since(self._joined),
            seconds_to_step=self._since(self._commits),
            bytes_moved=sum(r.bytes for r in self._receipts),
            verified=bool(proven) and proven == {r.rank for r in self._receipts},
        )

    def _since(self, times: dict[int, float]) -> float | None:
        """Seconds until the last rank, from the earliest evidence: the death behind a communication error may be noticed after it."""
        begun = min(attempt.fault.at for attempt in self.attempts)
        return max(times.values()) - begun if len(times) == self.world else None
