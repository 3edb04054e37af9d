"""Faults that a drill or a test places in a worker: each fires once, at a named point of a step.

``POINTS`` lists them. The session has most of them; ``install`` adds those inside model and optimizer.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from instep.messages import Fired, Injection

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

POINTS = {
    "step": "a commit has returned, or the block starts",
    "loader": "a batch is being delivered",
    "forward": "behind the first layer of the forward pass",
    "backward": "at the gradient of that layer's output",
    "issue": "a collective is about to be issued",
    "collective": "a collective was just issued",
    "complete": "a collective was just completed",
    "record": "at the entry of the commit, before anything is written",
    "prepared": "the private record is written, the barrier not entered",
    "barrier": "the barrier of the commit is issued, not waited for",
    "body": "inside the commit, before any update",
    "amid": "inside optimizer.step, with the first parameter group updated and the others not",
    "applied": "behind the local update of an adapter's optimizer, nothing handed out yet",
    "after": "at the end of the commit's body, all updated",
    "done": "the block has returned and is not released",
    "setup": "in a recovery: init() of a replacement",
    "connect": "in a recovery: communicators are being made",
    "restore": "in a recovery: state is about to move",
    "mid_transfer": "in a recovery: half of a state has moved",
    "publish": "in a recovery: what is derived from restored shards is about to be handed out",
    "verify": "in a recovery: state is about to be compared",
}
"""Every point, and where in a step it lies."""
COLLECTIVE = ("issue", "collective", "complete")
"""Points around each collective. ``issue#3`` is the one of the third collective that the rank issues in its step."""


class InjectedFault(RuntimeError):  # noqa: N818 - a fault on purpose, not an error of anybody
    """The exception of an injection of kind ``raise``; the script has nothing to do with it."""


class Injections:
    """The injections of one birth of a rank that have not fired yet.

    An injection's ``point`` may list alternatives, as in ``forward|record``: it fires at the first of them that is reached. ``tell`` sends
    ``Fired`` to the agent before the fault happens, so that it is never placed again.
    """

    def __init__(self, pending: Sequence[Injection], rank: int, birth: int, tell: Callable[[Fired], None]) -> None:
        """Keep what concerns this rank and birth."""
        self._pending = [i for i in pending if i.rank == rank and i.birth in (None, birth)]
        self._tell = tell
        self._working: Callable[[], int | None] = lambda: -1
        self._issued = 0

    def __bool__(self) -> bool:
        """Whether anything is left to fire."""
        return bool(self._pending)

    def __iter__(self) -> Iterator[Injection]:
        """What is left to fire."""
        return iter(self._pending)

    def at(self, point: str, step: int) -> None:
        """Fire what is placed here; costs nothing once all have fired. Raises ``InjectedFault``, or kills or stops the process."""
        if not self._pending or (point in COLLECTIVE and self._working() is None):
            return
        if point in ("step", "issue"):
            self._issued = 0 if point == "step" else self._issued + 1
        if (injection := self._placed(point, step)) is not None:
            self._pending.remove(injection)
            self._tell(Fired(id=injection.id, at=time.monotonic()))
            _act(injection, point, step)

    def expects(self, point: str, step: int) -> bool:
        """Whether the next call of ``at`` with these arguments fires."""
        return bool(self._pending) and self._working() is not None and self._placed(point, step) is not None

    def _placed(self, point: str, step: int) -> Injection | None:
        names = {point, f"{point}#{self._issued}"} if point in COLLECTIVE else {point}
        return next((i for i in self._pending if i.step in (None, step) and not names.isdisjoint(i.point.split("|"))), None)

    def wants(self, *points: str) -> bool:
        """Whether an injection at one of these points is left."""
        return any(set(points) & set(i.point.split("|")) for i in self._pending)

    def install(self, step: Callable[[], int | None]) -> Callable[[], None]:
        """Place torch's global hooks for the points inside model and optimizer; does nothing when no injection is there.

        ``step`` tells the step being worked on, or ``None`` outside a block, where ``collective`` does not count either. The result takes
        the hooks away again.
        """
        self._working = step
        stack = ExitStack()
        if self.wants("forward", "backward"):
            _install_module_points(self, step, stack)
        if self.wants("amid"):
            _install_optimizer_points(self, step, stack)
        return stack.close


def _act(injection: Injection, point: str, step: int) -> None:
    if injection.kind == "raise":
        raise InjectedFault(f"injected fault {injection.id}: rank {injection.rank} raises at {point!r} of step {step}")
    os.kill(os.getpid(), signal.SIGKILL if injection.kind == "kill" else signal.SIGSTOP)


def _install_module_points(injections: Injections, step: Callable[[], int | None], stack: ExitStack) -> None:
    from torch import Tensor
    from torch.nn.modules.module import register_module_forward_hook

    def fire(point: str) -> None:
        if (now := step()) is not None:
            injections.at(point, now)

    def leaf_done(module: "Module", inputs: Any, output: Any) -> None:
        if step() is None or not injections or not module.training or next(module.children(), None) is not None:
            return
        fire("forward")
        if injections.wants("backward") and isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
            output.register_hook(lambda _: fire("backward"))

    stack.callback(register_module_forward_hook(leaf_done).remove)


class _Torn(list[Any]):
    """Parameter groups that let a fault happen between the first and the second one."""

    def __init__(self, groups: list[Any], fire: Callable[[], None]) -> None:
        super().__init__(groups)
        self.groups = groups
        self._fire = fire

    def __iter__(self) -> Iterator[Any]:
        for index, group in enumerate(super().__iter__()):
            if index == 1:
                self._fire()
            yield group
        if len(self) < 2:
            self._fire()


def _install_optimizer_points(injections: Injections, step: Callable[[], int | None], stack: ExitStack) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: "Optimizer", args: Any, kwargs: Any) -> None:
        if step() is None or not injections.wants("amid"):
            return
        groups = optimizer.param_groups

        def fire() -> None:
            optimizer.param_groups = groups
            if (now := step()) is not None:
                injections.at("amid", now)

        optimizer.param_groups = _Torn(groups, fire)

    def behind(optimizer: "Optimizer", args: Any, kwargs: Any) -> None:
        if isinstance(optimizer.param_groups, _Torn):
            optimizer.param_groups = optimizer.param_groups.groups

    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(behind).remove)
