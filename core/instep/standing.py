"""Where a rank stands: its block, its committed steps, and how complete its shared state is."""

from dataclasses import dataclass

from instep.agent.records import Header, State
from instep.errors import InstepError
from instep.model import Plan, Role, Status


@dataclass
class Standing:
    """The one mutable record of progress, mirrored into the header that the agent reads."""

    header: Header
    block: int = 0
    step: int = 0
    status: Status = Status.CLEAN
    unpublished: bool = False
    """Whether what peers must get of the last update has not reached all of them."""

    def begin(self) -> None:
        """Show a process that sets up, in no incarnation yet."""
        self.header.put("step", self.step)
        self.header.put("joined", -1)
        self.at(State.SETUP)

    def at(self, state: State, *, operation: str | None = None) -> None:
        """Show what main is doing."""
        self.header.put("state", state)
        if operation is not None:
            self.header.operation(operation)

    def committed(self) -> None:
        """One more step is complete on this rank."""
        self.step += 1
        self.status = Status.CLEAN
        self.header.put("step", self.step)

    def must_hold(self, plan: Plan, rank: int) -> None:
        """Raise ``InstepError`` unless this rank is where its role says: the body that was to roll it forward may have raised."""
        if plan.roles[rank] is not Role.RESTORE and (self.step, self.status) != (plan.step, Status.CLEAN):
            raise InstepError(f"rank {rank} is {self.status.value} at step {self.step}, it was to hold step {plan.step}")

    def moved_to(self, block: int, step: int) -> None:
        """Stand, clean, where a plan says."""
        self.block, self.step, self.status, self.unpublished = block, step, Status.CLEAN, False
        self.header.put("block", block)
        self.header.put("step", step)
