"""Blocks: the user's function, run again at the last commit after every fault, until all ranks have finished it."""

import functools
import inspect
import json
import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from instep.agent.records import State
from instep.commit import barrier, settle
from instep.engine import BlockEnd
from instep.errors import CommsError, Interrupted, UsageError
from instep.injection import InjectedFault
from instep.messages import Closed, Done, Joined
from instep.model import Json
from instep.torch.gate import transport
from instep.torch.unwind import guarded

if TYPE_CHECKING:
    from instep.commit import Commit
    from instep.engine import Engine

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_NOTICE = 1.0


class Blocks:
    """Numbers the blocks of a session and runs them."""

    def __init__(self, engine: "Engine", commit: "Commit") -> None:
        self._engine, self._commit = engine, commit
        self._opaque: str | None = None
        self._began = 0

    def decorate(self, function: Callable[P, R]) -> Callable[P, R]:
        """The recoverable version of a function. Raises ``UsageError`` for kinds that cannot be run again."""
        check_kind(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast("R", self._run(functools.partial(function, *args, **kwargs), name=function.__qualname__))

        return run

    def _run(self, call: Callable[[], object], *, name: str) -> object:
        s = self._engine
        if s.running:
            raise UsageError(f"block {name} inside another block: a recoverable function may not call another one")
        s.off_main_thread(f"block {name}")
        finished = s.finished(s.standing.block)
        if finished is not None:
            s.standing.block += 1
            return finished.value
        s.running = True
        try:
            return self._loop(call, name)
        except (UsageError, SystemExit) as error:
            s.fatal(error)
            raise
        except BaseException:
            s.cut = True
            raise
        finally:
            s.running = False

    def _loop(self, call: Callable[[], object], name: str) -> object:
        s = self._engine
        if self._opaque is not None:
            raise UsageError(f"a block that another one follows must return a value that JSON can hold, for replacements; {self._opaque}")
        self._enter()
        self._began = s.step
        while True:
            try:
                value = self._once(call)
                self._release(value, name)
                return value
            except Interrupted:
                pass
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the user's step raised is a fault of this rank
                self._faulted(error)
            self._commit.forget()
            s.unwound()
            s.lifecycle.rejoin()

    def _once(self, call: Callable[[], object]) -> object:
        s = self._engine
        s.standing.at(State.STEP)
        try:
            s.point("step")
            s.end_at_limit()
            value = guarded(call)
        except BlockEnd:
            value = None
        s.point("done")
        return value

    def _enter(self) -> None:
        s = self._engine
        s.standing.header.put("block", s.standing.block)
        if s.fresh:
            s.lifecycle.rejoin()
            return
        first = not s.entered
        s.enter()
        if first:
            s.tell(Joined(incarnation=s.board.current, block=s.standing.block, step=s.step, at=s.clock()))

    def _release(self, value: object, name: str) -> None:
        """Two phases: all done, all acknowledged that they know; until then this rank stays a donor."""
        s = self._engine
        s.standing.at(State.DONE)
        if s.step == self._began:
            log.warning("block %s ended without a commit: nothing in it was protected (step %d)", name, s.step)
        settle(s)
        if not barrier(s, done=True):
            raise Interrupted("cut in the barrier at the end of the block")
        block, board = s.standing.block, s.board
        plain, result = as_json(value)
        s.tell(Done(incarnation=board.current, block=block, step=s.step, value=result, plain=plain))
        with s.gate.waiting("end of block", s.step):
            board.wait(lambda b: block in b.closing, what="all ranks to finish the block", check=s.gate.check)
            s.tell(Closed(incarnation=board.current, block=block))
            board.wait(lambda b: block in b.released, what="the release of the block", check=s.gate.check)
        self._opaque = None if plain else f"{name} returned {type(value).__name__}"
        s.left()

    def _faulted(self, error: Exception) -> None:
        s = self._engine
        comms = isinstance(error, CommsError) or s.gate.broken or transport(error)
        if s.board.revoked or (comms and s.board.noticed_within(_NOTICE)):
            return
        log.error("rank %d raised in step %d: %s", s.rank, s.step, error, exc_info=None if isinstance(error, InjectedFault) else error)
        s.lifecycle.report(error, step=s.step, detail=_where(error), kind="comms" if comms else "exception")
        error.__traceback__ = None


def check_kind(function: Callable[P, R]) -> None:
    """Raise ``UsageError`` for a function that cannot be a block."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{function.__qualname__} is a coroutine or a generator; a block must be a function that can be called again")


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def as_json(value: object) -> tuple[bool, Json]:
    """Whether JSON holds a value unchanged, and what it makes of it."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False, None
    back: Json = json.loads(text)
    return back == value, back
