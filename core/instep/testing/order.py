"""Any legal order of calls: a state machine that draws orders of start, steps, faults and ends, and runs them in a real process."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from instep.testing.contract import broken
from instep.testing.rehearsal import Rehearsal

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


def machine(rehearsal: Rehearsal, who: str) -> type[RuleBasedStateMachine]:  # noqa: C901 - a machine is its rules
    """The state machine of one rank without communicators."""

    class Order(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0
            self.open = self.acknowledged = False
            self.told: list[str] = []
            rehearsal.start()
            self.call("announce", groups=[])

        def call(self, hook: str, **given: object) -> None:
            self.told.append(hook)
            for line in rehearsal.call(hook, **given):  # type: ignore[arg-type]
                if not line.answer.ok:
                    raise OrderError(f"hook '{hook}' of {who} {line.answer}. The calls until then: start, {', '.join(self.told)}")

        @precondition(lambda self: not self.open)
        @rule()
        def committed(self) -> None:
            self.step += 1
            self.call("committed", step=self.step)

        @precondition(lambda self: not self.open)
        @rule()
        def detect(self) -> None:
            self.call("detect")

        @rule()
        def fault(self) -> None:
            rehearsal.incarnation += 1
            self.open, self.acknowledged = True, False
            self.call("quiesce", incarnation=rehearsal.incarnation, thread=True)

        @precondition(lambda self: self.open and not self.acknowledged)
        @rule()
        def again(self) -> None:
            self.call("quiesce", incarnation=rehearsal.incarnation, thread=True)

        @precondition(lambda self: self.open and not self.acknowledged)
        @rule()
        def acknowledge(self) -> None:
            self.acknowledged = True
            self.call("quiesce", incarnation=rehearsal.incarnation, acknowledging=True)
            self.call("announce", groups=[])

        @precondition(lambda self: self.open and self.acknowledged)
        @rule()
        def in_step(self) -> None:
            self.open = False

        @rule()
        def report(self) -> None:
            self.call("report")

        def teardown(self) -> None:
            if rehearsal.world.living:
                self.call("close")

    return Order


def check(rehearsal: Rehearsal, *, who: str) -> None:
    """Run many orders; fails with the shortest one that breaks the plugin."""
    try:
        run_state_machine_as_test(machine(rehearsal, who), settings=QUIET)
    except OrderError as error:
        message = str(error)
    else:
        return
    broken(f"an order of calls that a job may bring about breaks the plugin: {message}")
