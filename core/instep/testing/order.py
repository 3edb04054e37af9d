"""Any legal order of calls: a state machine that draws orders of start, steps, faults and ends, and runs them in a real process."""

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from instep.model import Json
from instep.testing.contract import broken
from instep.testing.walk import Walk

EXAMPLES = 12
STEPS = 12
QUIET = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class OrderError(AssertionError):
    """A call failed in an order that a job may bring about; the message tells the order."""


class Order(RuleBasedStateMachine):
    """One rank without communicators. ``check`` makes a subclass with the walk that it takes."""

    walk: ClassVar[Walk]
    who: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.open = self.acknowledged = False
        self.told: list[str] = []
        self.walk.begin()
        self.call("announce", groups=[])

    def call(self, hook: str, **given: Json) -> None:
        """Call a hook, which must not fail."""
        self.told.append(hook)
        for line in self.walk.call(hook, each=lambda _: given):
            if not line.answer.ok:
                raise OrderError(f"hook '{hook}' of {self.who} {line.answer}. The calls until then: start, {', '.join(self.told)}")

    @precondition(lambda self: not self.open)
    @rule()
    def committed(self) -> None:
        """A step is done."""
        self.step += 1
        self.call("committed", step=self.step)
        self.call("keep", step=self.step, incarnation=self.walk.incarnation)

    @precondition(lambda self: not self.open)
    @rule()
    def detect(self) -> None:
        """A commit begins."""
        self.call("detect")

    @rule()
    def fault(self) -> None:
        """A fault, in a step or in a recovery."""
        self.walk.incarnation += 1
        self.open, self.acknowledged = True, False
        self.call("quiesce", incarnation=self.walk.incarnation, thread=True)

    @precondition(lambda self: self.open and not self.acknowledged)
    @rule()
    def again(self) -> None:
        """The control thread repeats itself."""
        self.call("quiesce", incarnation=self.walk.incarnation, thread=True)

    @precondition(lambda self: self.open and not self.acknowledged)
    @rule()
    def acknowledge(self) -> None:
        """The main thread has unwound, and votes."""
        self.acknowledged = True
        self.call("quiesce", incarnation=self.walk.incarnation, acknowledging=True)
        self.call("announce", groups=[])

    @precondition(lambda self: self.open and self.acknowledged)
    @rule()
    def in_step(self) -> None:
        """The recovery is over."""
        self.open = False

    @rule()
    def report(self) -> None:
        """An incident is over."""
        self.call("report")

    def teardown(self) -> None:
        """The process ends."""
        if self.walk.world.living:
            self.call("close")


def check(walk: Walk, *, who: str) -> None:
    """Run many orders; fails with the shortest one that breaks the plugin."""
    falsify(Order, walk, who=who, how=QUIET, what="an order of calls")


def falsify(machine: type[RuleBasedStateMachine], walk: Walk, *, who: str, how: settings, what: str) -> None:
    """Run a state machine; fails with the shortest order in which it breaks the plugin, which ``what`` names."""
    try:
        run_state_machine_as_test(type(machine.__name__, (machine,), {"walk": walk, "who": who}), settings=how)
    except OrderError as error:
        message = str(error)
    except Flaky:
        message = f"{who} does not behave the same in the same order of calls: it keeps something from one instance to the next"
    else:
        return
    broken(f"{what} that a job may bring about breaks the plugin: {message}")
