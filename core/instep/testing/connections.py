"""Any legal order of connections: a state machine over a real world that connects, computes, loses ranks and connects again."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from instep.model import Group
from instep.testing.contract import broken
from instep.testing.order import QUIET, OrderError
from instep.testing.rehearsal import ACTS, Rehearsal

GROUPS = ((0, 1), (1, 2), (2, 0), (2, 1, 0))


def machine(rehearsal: Rehearsal, who: str) -> type[RuleBasedStateMachine]:  # noqa: C901 - a machine is its rules
    """The state machine of a whole world."""

    class Connections(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.live: list[Group] = []
            self.told: list[str] = []
            self.made = 0
            for rank in range(rehearsal.world.size):
                if rank not in rehearsal.world.living:
                    rehearsal.world.replace(rank)
            rehearsal.incarnation += 1
            rehearsal.start()
            self.connect([rehearsal.everyone])

        def connect(self, groups: list[Group]) -> None:
            self.told.append(f"connect {[g.ranks for g in groups]}")
            for line in rehearsal.connect(*groups):
                if not line.answer.ok or line.said.get("wrong") or line.none:
                    self.fail(f"reinit_comms on rank {line.rank} {line.said.get('wrong') or line.answer}")
            self.live = [*self.live, *groups]

        def fail(self, what: str) -> None:
            raise OrderError(f"{who}: {what}. The calls until then: {', '.join(self.told)}")

        @precondition(lambda self: self.live and len(self.live) < 4)
        @rule(ranks=st.sampled_from(GROUPS))
        def new_group(self, ranks: tuple[int, ...]) -> None:
            self.made += 1
            self.connect([Group(name=str(self.made), ranks=ranks, backend=rehearsal.backend)])

        @precondition(lambda self: self.live)
        @rule()
        def compute(self) -> None:
            self.told.append("collectives")
            for group in self.live:
                given = group.model_dump(mode="json")
                for rank, answer in rehearsal.world.together(list(group.ranks), f"{ACTS}:collectives", group=given).items():
                    if not answer.ok or answer.value:
                        self.fail(f"collectives of {group.ranks} on rank {rank}: {answer.value or answer}")

        @rule(lost=st.sampled_from([None, 0, 1, 2]))
        def fault(self, lost: int | None) -> None:
            self.told.append("a fault" if lost is None else f"rank {lost} dies")
            if lost is not None:
                rehearsal.world.kill(lost)
            rehearsal.quiesce()
            if lost is not None:
                rehearsal.world.replace(lost)
                rehearsal.start([lost])
            groups, self.live = self.live, []
            self.connect(groups)

        def teardown(self) -> None:
            rehearsal.call("close")

    return Connections


def check(rehearsal: Rehearsal, *, who: str) -> None:
    """Run some orders; fails with the shortest one that breaks the plugin."""
    try:
        run_state_machine_as_test(machine(rehearsal, who), settings=settings(QUIET, max_examples=5, stateful_step_count=8))
    except OrderError as error:
        message = str(error)
    else:
        return
    broken(f"an order of connections that a job may bring about breaks the plugin: {message}")
