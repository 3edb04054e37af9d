"""The board: what the control thread posts and the main thread reads. The one source for "is this incarnation out of date?"."""

import threading
import time
from collections.abc import Callable

from instep.errors import InstepError, Interrupted
from instep.messages import Gathered, Message, Setup, Welcome
from instep.model import Fault, Plan

_POLL = 0.1


class Board:
    """Newest incarnation, newest plan, and the agent's other answers, behind one condition variable.

    ``target`` is the newest incarnation that a fault opened, ``current`` the one that this rank's communicators belong to,
    ``acknowledged`` the newest one it has voted in. Main is *revoked* while ``target`` is ahead of ``current``.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.quieting = threading.Lock()
        self.target = 0
        self.current = 0
        self.acknowledged = 0
        self.fault: Fault | None = None
        self.noticed = 0.0
        self.plan: Plan | None = None
        self.closing: set[int] = set()
        self.released: set[int] = set()
        self.setup: Setup | None = None
        self.welcome: Welcome | None = None
        self.gathered: dict[str, Gathered] = {}
        self.lost = False

    @property
    def revoked(self) -> bool:
        """Whether a fault made the current incarnation out of date."""
        return self.target > self.current

    def check(self) -> None:
        """Raise ``Interrupted`` if the current incarnation is out of date."""
        if self.target > self.current:
            raise Interrupted(f"incarnation {self.current} is out of date, {self.target} was opened")

    def checker(self, incarnation: int) -> Callable[[], None]:
        """A check for a recovery towards ``incarnation``."""

        def check() -> None:
            if self.target > incarnation:
                raise Interrupted(f"incarnation {incarnation} is out of date, {self.target} was opened")

        return check

    def interrupt(self, incarnation: int, fault: Fault) -> bool:
        """Post a fault; false when it is not news."""
        with self.changed:
            if incarnation <= self.target:
                return False
            self.target, self.fault, self.noticed = incarnation, fault, time.monotonic()
            self.changed.notify_all()
            return True

    def adopt(self, plan: Plan) -> bool:
        """Make the plan's incarnation the current one, unless a newer one was opened meanwhile."""
        with self.changed:
            if self.target != plan.incarnation:
                return False
            self.current = plan.incarnation
            return True

    def acknowledge(self, incarnation: int) -> None:
        """From here on nothing may be closed on behalf of ``incarnation``: peers will reconnect."""
        with self.quieting:
            self.acknowledged = max(self.acknowledged, incarnation)

    def post(self, apply: Callable[["Board"], None]) -> None:
        """Change the board under its lock and wake main."""
        with self.changed:
            apply(self)
            self.changed.notify_all()

    def wait(
        self, ready: Callable[["Board"], bool], *, what: str, seconds: float | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until ``ready``; ``check`` may raise at any time. Raises ``InstepError`` naming ``what`` after ``seconds``.

        Without ``seconds`` the agent owns the deadline; if the agent is gone the control thread ends the process.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while not ready(self):
                if check is not None:
                    check()
                if deadline is not None and time.monotonic() > deadline:
                    raise InstepError(f"waited {seconds} s for {what}")
                self.changed.wait(_POLL)

    def noticed_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a notice; a connection often breaks before the notice of its cause arrives."""
        with self.changed:
            return self.changed.wait_for(lambda: self.revoked, seconds)


def deliver(board: Board, message: Message) -> None:
    """Post one message of the agent, other than ``Interrupt``, on the board."""

    def apply(b: Board) -> None:
        match message.t:
            case "setup":
                b.setup = message
            case "welcome":
                b.welcome = message
            case "gathered":
                b.gathered[message.key] = message
            case "planned":
                if message.plan.incarnation == b.target:
                    b.plan = message.plan
            case "closing":
                b.closing.add(message.block)
            case "release":
                b.released.add(message.block)
            case other:
                raise InstepError(f"the agent sent {other!r}, which workers do not understand: agent and worker have different versions")

    board.post(apply)
