"""Faults that a drill or a test places in a worker: each fires once, at a named point of a step.

Points of the session: ``step`` (a commit has returned, or the block starts), ``loader`` (a batch is being delivered), ``collective`` (one
was just issued), ``record`` (commit entered, private record not written), ``prepared`` (written), ``barrier`` (issued, not waited for),
``body`` (just inside), ``after`` (end of the body), ``done`` (block returned, not released); in a recovery ``setup``, ``connect``,
``restore``, ``mid_transfer``, ``verify``. ``install`` adds ``amid`` (inside the first ``optimizer.step`` of the body, its first parameter
group updated, the others not), ``forward`` (after the first leaf module) and ``backward`` (at the gradient of that module's output).
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

MODEL_POINTS = ("forward", "backward", "amid")
POINTS = (
    *("step", "loader", "collective", "record", "prepared", "barrier", "body", "after", "done"),
    *("setup", "connect", "restore", "mid_transfer", "verify"),
    *MODEL_POINTS,
)


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

    def __bool__(self) -> bool:
        """Whether anything is left to fire."""
        return bool(self._pending)

    def __iter__(self) -> Iterator[Injection]:
        """What is left to fire."""
        return iter(self._pending)

    def at(self, point: str, step: int) -> None:
        """Fire what is placed here; costs nothing once all have fired. Raises ``InjectedFault``, or kills or stops the process."""
        if not self._pending or (point == "collective" and self._working() is None):
            return
        for injection in self._pending:
            if injection.step in (None, step) and point in injection.point.split("|"):
                self._pending.remove(injection)
                self._tell(Fired(id=injection.id, at=time.monotonic()))
                _act(injection, point, step)
                return

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
