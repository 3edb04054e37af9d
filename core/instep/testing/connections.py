"""Any legal order of connections: a state machine over a real world that connects, computes, loses ranks and connects again."""

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from instep.model import Group
from instep.testing.order import QUIET, OrderError, falsify
from instep.testing.walk import ACTS, Walk

GROUPS = ((0, 1), (1, 2), (2, 0), (2, 1, 0))


class Connections(RuleBasedStateMachine):
    """A whole world. ``check`` makes a subclass with the walk that it takes."""

    walk: ClassVar[Walk]
    who: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Group] = []
        self.told: list[str] = []
        self.made = 0
        self.walk.begin()
        self.connect([self.walk.everyone])

    def connect(self, groups: list[Group]) -> None:
        """Connect groups, which must succeed."""
        self.told.append(f"connect {[g.ranks for g in groups]}")
        for line in self.walk.connect(*groups):
            if not line.answer.ok or line.said.get("wrong") or line.none:
                self.fail(f"reinit_comms on rank {line.rank} {line.said.get('wrong') or line.answer}")
        self.live = [*self.live, *groups]

    def fail(self, what: str) -> None:
        """Tell the order until here."""
        raise OrderError(f"{self.who}: {what}. The calls until then: {', '.join(self.told)}")

    @precondition(lambda self: self.live and len(self.live) < 4)
    @rule(ranks=st.sampled_from(GROUPS))
    def new_group(self, ranks: tuple[int, ...]) -> None:
        """The script makes a process group."""
        self.made += 1
        self.connect([Group(name=str(self.made), ranks=ranks, backend=self.walk.backend)])

    @precondition(lambda self: self.live)
    @rule()
    def compute(self) -> None:
        """Every group adds up right."""
        self.told.append("collectives")
        for group in self.live:
            given = group.model_dump(mode="json")
            for rank, answer in self.walk.world.together(list(group.ranks), f"{ACTS}:collectives", group=given).items():
                if not answer.ok or answer.value:
                    self.fail(f"collectives of {group.ranks} on rank {rank}: {answer.value or answer}")

    @rule(lost=st.sampled_from([None, 0, 1, 2]))
    def fault(self, lost: int | None) -> None:
        """An exception, or a death; all groups are connected again."""
        self.told.append("a fault" if lost is None else f"rank {lost} dies")
        if lost is not None:
            self.walk.world.kill(lost)
        self.walk.quiesce()
        if lost is not None:
            self.walk.world.replace(lost)
            self.walk.start([lost])
        groups, self.live = self.live, []
        self.connect(groups)

    def teardown(self) -> None:
        """All processes end."""
        self.walk.call("close")


def check(walk: Walk, *, who: str) -> None:
    """Run some orders; fails with the shortest one that breaks the plugin."""
    how = settings(QUIET, max_examples=5, stateful_step_count=8)
    falsify(Connections, walk, who=who, how=how, what="an order of connections")
