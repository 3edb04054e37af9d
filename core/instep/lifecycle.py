"""The lifecycle of a recovery on one rank: acknowledge, plan, connect, restore, resume, verify; again for each newer fault.

This module orders the phases, times them and reports their failure; plugins do the work, and ``Local`` is all it knows of the rank.
It imports no torch and reads no clock of its own, so that a simulator can run it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from instep.board import Board
from instep.errors import InstepError, Interrupted, PluginError, UsageError
from instep.hooks import CommsRequest, Interruption, Recovery
from instep.messages import Faulted, Joined, Message, Voted
from instep.model import Fault, Plan, Receipt, Vote
from instep.plugins import LoadedPlugins

log = logging.getLogger(__name__)
Clock = Callable[[], float]


class Local(Protocol):
    """What the lifecycle needs of the rank it runs on."""

    @property
    def rank(self) -> int:
        """Own global rank."""

    def settle(self) -> None:
        """Lay communicators to rest and drop live iterators; main is about to acknowledge."""

    def vote(self, incarnation: int) -> Vote:
        """What this rank holds now."""

    def meanwhile(self, check: Callable[[], None], planned: Callable[[], bool]) -> None:
        """Whatever can be done before the plan is there; ``check`` may raise. Others may take long: a replacement is still setting up."""

    def phase(self, name: str) -> None:
        """Show the phase in the record."""

    def requests(self, plan: Plan) -> Sequence[CommsRequest]:
        """The groups to connect, one request a backend."""

    def install(self, request: CommsRequest, answer: tuple[str, object] | None) -> None:
        """Put the communicators of a plugin's answer into their handles. Raises ``PluginError`` if it is none."""

    def recovery(self, plan: Plan) -> Recovery:
        """The argument of the later phases."""

    @property
    def publishes(self) -> bool:
        """Whether anything is derived from restored state."""

    def publish(self) -> None:
        """Derive it, together with all other ranks."""

    def reload(self, step: int) -> None:
        """Private state back from the record."""

    def in_step(self, plan: Plan) -> None:
        """The recovery succeeded: this rank is clean at the plan's step."""


class Lifecycle:
    """Brings one rank back in step after every fault."""

    def __init__(self, board: Board, plugins: LoadedPlugins, local: Local, tell: Callable[[Message], None], clock: Clock) -> None:
        self._board, self._plugins, self._local = board, plugins, local
        self._tell, self._clock = tell, clock
        self._receipts: list[Receipt] = []
        self._incarnation = 0

    def begin(self, recovery: Recovery) -> int | None:
        """Before the first step: where a plugin has brought all ranks, from what an earlier run left; ``None`` if nowhere."""
        answer = self._plugins.first("begin", recovery=recovery)
        if answer is None:
            return None
        plugin, step = answer
        if not isinstance(step, int):
            raise PluginError(f"plugin {plugin!r}: begin returned {step!r}, not a number of steps")
        if self._local.publishes:
            self._local.publish()
        self._local.reload(step)
        plan = recovery.plan.model_copy(update={"step": step})
        self._plugins.first("resume_data", recovery=dataclasses.replace(recovery, plan=plan))
        log.info("plugin %s: going on at step %d of an earlier run", plugin, step)
        return step

    def quiesce(self, incarnation: int, fault: Fault) -> bool:
        """One round of ``quiesce`` on every plugin, from the control thread; false once main has acknowledged."""
        with self._board.quieting:
            if self._board.acknowledged >= incarnation or self._board.target != incarnation:
                return False
            self._quiesce(Interruption(incarnation=incarnation, fault=fault, acknowledging=False))
        return True

    def acknowledge(self) -> Plan:
        """Vote in the newest incarnation, again if a newer one opens, and return its plan."""
        while True:
            try:
                return self._acknowledge()
            except Interrupted:
                continue

    def rejoin(self) -> None:
        """Run attempts until this rank is in step with all others. A failed attempt is reported, and the next incarnation awaited.

        Raises ``UsageError`` when the script is to blame: no attempt would end better.
        """
        while True:
            self._receipts, phase = [], "quiesce"
            try:
                plan = self._planned() or self.acknowledge()
                phase = "reinit_comms"
                plan = self._attempt(plan)
            except Interrupted:
                continue
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001 - the one place: any failure of a phase sends all ranks to the next attempt
                self._failed(self._receipts[-1].phase if self._receipts else phase, error)
            else:
                self._tell(
                    Joined(incarnation=plan.incarnation, block=plan.block, step=plan.step, at=self._clock(), receipts=tuple(self._receipts))
                )
                return

    def report(self, error: BaseException, *, step: int, detail: str, kind: str = "exception") -> None:
        """Tell the agent of an exception in this rank's block, and wait until it has opened the next incarnation."""
        incarnation = self._board.target
        fault = Fault(
            kind="exception",
            ranks=(self._local.rank,),
            detail=detail,
            detected_by="worker",
            at=self._clock(),
            signature=f"{kind}:{self._local.rank}:{type(error).__name__}:{step}",
        )
        self._tell(Faulted(incarnation=incarnation, fault=fault))

    def _acknowledge(self) -> Plan:
        board = self._board
        board.wait(lambda b: b.target > b.current, what="the notice of a fault")
        incarnation, fault = board.target, board.fault
        self._incarnation = incarnation
        if fault is None:
            raise InstepError(f"incarnation {incarnation} was opened without a fault")
        self._local.phase("quiesce")
        with board.quieting:
            self._quiesce(Interruption(incarnation=incarnation, fault=fault, acknowledging=True))
            self._local.settle()
        check = board.checker(incarnation)
        vote = self._local.vote(incarnation)
        check()
        board.acknowledge(incarnation)
        self._tell(Voted(vote=vote))
        self._local.phase("plan")
        self._local.meanwhile(check, lambda: board.plan is not None and board.plan.incarnation == incarnation)
        board.wait(lambda b: b.plan is not None and b.plan.incarnation == incarnation, what="the plan", check=check)
        plan = board.plan
        if plan is None:
            raise InstepError("the plan disappeared")
        return plan

    def _planned(self) -> Plan | None:
        plan = self._board.plan
        return plan if plan is not None and plan.incarnation == self._board.target > self._board.current else None

    def _attempt(self, plan: Plan) -> Plan:
        check = self._board.checker(plan.incarnation)
        if not self._board.adopt(plan):
            raise Interrupted("superseded before it began")
        for request in self._local.requests(plan):
            self._timed("reinit_comms", "core", functools.partial(self._connect, request))
        recovery = self._local.recovery(plan)
        check()
        self._timed("restore_state", "core", functools.partial(self._answer, "restore_state", recovery))
        if (step := self._receipts[-1].step) is not None:
            plan = plan.model_copy(update={"step": step})
            recovery = dataclasses.replace(recovery, plan=plan)
        check()
        if self._local.publishes:
            self._timed("publish", "core", self._published)
            check()
        self._timed("resume_data", "core", functools.partial(self._resume, recovery))
        check()
        for plugin, verify in self._plugins.each("verify", recovery=recovery):
            self._timed("verify", plugin, functools.partial(_named, plugin, verify))
        check()
        self._local.in_step(plan)
        return plan

    def _connect(self, request: CommsRequest) -> tuple[str, object]:
        answer = self._plugins.first("reinit_comms", request=request)
        self._local.install(request, answer)
        return (answer[0] if answer else "core"), None

    def _answer(self, hook: str, recovery: Recovery) -> tuple[str, object]:
        answer = self._plugins.first(hook, recovery=recovery)
        if answer is None:
            raise PluginError(f"no enabled plugin answered {hook}: enable one (pip install 'instep[state-replica]')")
        return answer

    def _published(self) -> tuple[str, object]:
        self._local.publish()
        return "core", None

    def _resume(self, recovery: Recovery) -> tuple[str, object]:
        self._local.reload(recovery.plan.step)
        return self._plugins.first("resume_data", recovery=recovery) or ("core", None)

    def _timed(self, phase: str, plugin: str, run: Callable[[], tuple[str, object]]) -> None:
        """Run one phase and keep its receipt; the last receipt names the phase that failed, if it did."""
        self._local.phase(phase)
        begin = self._clock()
        self._receipts.append(Receipt(phase=phase, plugin=plugin, rank=self._local.rank, seconds=0.0))
        plugin, result = run()
        seconds = self._clock() - begin
        given = result if isinstance(result, Receipt) else self._receipts[-1]
        self._receipts[-1] = given.model_copy(update={"phase": phase, "plugin": plugin, "rank": self._local.rank, "seconds": seconds})
        log.info("%s by %s: %.1f ms", phase, plugin, 1e3 * seconds)

    def _quiesce(self, interruption: Interruption) -> None:
        for _plugin, run in self._plugins.each("quiesce", interruption=interruption):
            run()

    def _failed(self, phase: str, error: Exception) -> None:
        board, incarnation = self._board, self._incarnation
        log.warning("attempt %d failed in %s: %s: %s", incarnation, phase, type(error).__name__, error, exc_info=error)
        if board.target > incarnation:
            return  # most likely because of the newer fault, and out of date in any case
        fault = Fault(
            kind="plugin",
            ranks=(self._local.rank,),
            detail=f"{phase}: {type(error).__name__}: {error}",
            detected_by="worker",
            at=self._clock(),
            signature=f"{self._local.rank}:{phase}:{type(error).__name__}",
        )
        self._tell(Faulted(incarnation=incarnation, fault=fault, phase=phase))
        board.wait(lambda b: b.target > incarnation, what="the next attempt")


def _named(plugin: str, run: Callable[[], object]) -> tuple[str, object]:
    return plugin, run()
