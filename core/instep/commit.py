"""The two-phase commit: record the private state for s+1, pass a barrier with all ranks, then let the body change shared state.

A rank cut in the barrier acknowledges from inside ``__enter__``: if the plan is s+1 the body runs (it rolls forward) and the block
unwinds at ``__exit__``; if the plan is s it unwinds at once. Without record and barrier, random kills lose bitwise equality.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from instep.agent.barrier import CODES
from instep.agent.records import State
from instep.errors import CommsError, Interrupted, UsageError
from instep.messages import Committed
from instep.model import Role, Status

if TYPE_CHECKING:
    from instep.engine import Engine

_WRAP = CODES // 2
_SLICE = 0.005
"""Seconds that a rank waits in the barrier before it looks whether a fault has cut it."""


class Commit:
    """``with session.commit(): optimizer.step()`` moves shared state from step s to s+1 on all ranks, or on none.

    With adapters protected it is their optimizer's step that opens the body (``update``) and hands out what it changed (``publish``):
    what comes before in the ``with`` may still talk to other ranks. See ``instep.torch.adapter``.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._entered = self._inside = self._masked = self._rolling = False
        self._unpublished: CommsError | None = None

    def __enter__(self) -> None:
        s = self._engine
        self._allowed()
        s.gate.check()
        s.local.followers.detect()
        s.point("record")
        self._entered = True
        if not s.state.adapters:
            try:
                self._open()
            except BaseException:
                self._leave()
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                if not self._inside:
                    raise UsageError(
                        f"the commit of step {self._engine.step} is empty: call optimizer.step() of the protected adapter in it"
                    )
                self._examine()
                self._inside = self._engine.gate.body = False
                self._advance()
        finally:
            self._leave()
        if error is None:
            self._deliver()

    @contextmanager
    def update(self) -> Iterator[None]:
        """See ``adapter.Port``."""
        s = self._engine
        if not self._entered or self._inside:
            raise UsageError(
                f"optimizer.step() of a protected adapter {'twice in' if self._inside else 'outside of'} a commit, in step {s.step}: "
                "it stands once inside `with session.commit()`"
            )
        self._open()
        yield
        s.point("applied")  # and torn still: the rest of the body is part of the step

    def publish(self, run: Callable[[], object]) -> None:
        """See ``adapter.Port``. A rank that rolls forward has nobody to talk to: all ranks publish in the recovery."""
        s = self._engine
        if not self._inside:
            raise UsageError("an adapter published outside of its commit's body")
        s.standing.unpublished = True
        if self._rolling:
            return
        s.gate.body = False
        try:
            run()
        except Interrupted:
            return
        except CommsError as error:
            self._unpublished = error
            return
        finally:
            s.gate.body = True
        s.standing.unpublished = False

    def _open(self) -> None:
        """Record, barrier, body: from here on only local updates, and no way back."""
        s = self._engine
        s.standing.at(State.COMMIT)
        self._follow()
        settle(s)
        with s.unwinder.library():
            s.state.private.write(s.step + 1)
            s.state.shared.prepare()
        s.point("prepared")
        s.gate.check()
        s.unwinder.mask()
        self._masked = True
        self._rolling = not barrier(s, done=False)
        if self._rolling and not self._may_roll_forward():
            raise Interrupted("cut in the commit barrier")
        self._inside = s.gate.body = True
        s.standing.status = Status.TORN
        s.standing.at(State.BODY)
        s.point("body")

    @property
    def inside(self) -> bool:
        """Whether the body is running."""
        return self._inside

    def forget(self) -> None:
        """The block unwound: no body is running."""
        if self._inside:
            self._engine.gate.body = False
        self._entered = self._inside = self._masked = self._rolling = False  # the unwinder has forgotten its sections
        self._unpublished = None

    def _leave(self) -> None:
        self._entered = self._inside = self._engine.gate.body = False
        if self._masked:
            self._masked = False
            self._engine.unwinder.unmask()

    def _examine(self) -> None:
        s = self._engine
        s.point("after")
        if s.state.private.drew():
            raise UsageError(
                f"the commit body of step {s.step} drew random numbers: a rank that rolls forward would draw differently. "
                "Draw before `with session.commit()`, or from a generator of your own seeded by session.step"
            )
        s.state.share_moved()

    def _advance(self) -> None:
        """Everything that makes this rank stand at the next step; no interruption may land in it."""
        s = self._engine
        s.standing.committed()
        s.state.shared.commit()
        s.standing.at(State.STEP)
        if s.first_commit:
            s.first_commit = False
            shards = s.state.sizes() if s.board.current == 0 else {}
            s.tell(Committed(incarnation=s.board.current, step=s.step, at=s.clock(), shards=shards))
        if s.state.ledger is not None:
            s.state.ledger.committed(s.step - 1)
        s.local.followers.committed(s.step)
        s.unwinder.stepped()

    def _deliver(self) -> None:
        """What was held back during the body, and what a step's end brings."""
        s = self._engine
        if self._rolling:
            self._rolling = False
            raise Interrupted("rolled forward")
        s.gate.check()
        if self._unpublished is not None:
            error, self._unpublished = self._unpublished, None
            raise error
        if s.board.current == 0 and s.step == s.start + 1 and s.world_size > 1:
            s.state.agree_on_moved(s.local.comms.gather)
        s.end_at_limit()
        s.point("step")

    def _follow(self) -> None:
        """Wait until nobody can fall back to the step whose record is about to be overwritten."""
        s, meeting = self._engine, self._engine.local.barrier
        if s.world_size == 1 or meeting.behind(s.board.current, _SLICE):
            return
        with s.gate.waiting("peers in the last commit barrier", s.step):
            while not meeting.behind(s.board.current, _SLICE):
                s.gate.check()

    def _allowed(self) -> None:
        s = self._engine
        if not s.running:
            raise UsageError(
                "session.commit() outside a recoverable block: steps are committed inside the function that @session.recoverable decorates"
            )
        if self._entered:
            raise UsageError(f"nested session.commit() in step {s.step}: a step is one commit")
        s.off_main_thread("session.commit()")
        if s.state.shared.joining():
            raise UsageError("session.commit() inside ddp.join(): all ranks must commit the same steps; use drop_last=True or pad the data")

    def _may_roll_forward(self) -> bool:
        s = self._engine
        s.standing.status = Status.PREPARED
        try:
            plan = s.lifecycle.acknowledge()
        finally:
            s.standing.status = Status.CLEAN
        return plan.roles[s.rank] is Role.ROLL_FORWARD


def settle(engine: "Engine") -> None:
    """Before a barrier: wait until the copies of the present step are complete, so that all ranks could come back to it."""
    if engine.local.followers.settled(0):
        return
    with engine.gate.waiting("copies of the last step", engine.step):
        while not engine.local.followers.settled(_SLICE):
            engine.gate.check()


def barrier(engine: "Engine", *, done: bool) -> bool:
    """Pass a barrier with all ranks that also compares the step; false when a fault cut it.

    Raises ``UsageError`` on every rank when some commit while others are ``done`` with the block, or are at another step.
    """
    if engine.world_size == 1:
        return True
    meeting, board = engine.local.barrier, engine.board
    meeting.arrive(board.current, 2 * (engine.step % _WRAP) + done)
    engine.point("barrier")
    if not meeting.wait(_SLICE):
        with engine.gate.waiting(f"{'end of block' if done else 'commit'} barrier", engine.step):
            while not meeting.wait(_SLICE):
                if board.revoked:
                    return False
    if not meeting.agreed():
        raise _uneven(engine, done=done)
    meeting.passed()
    return True


def _uneven(engine: "Engine", *, done: bool) -> UsageError:
    mine = engine.step.to_bytes(8, "little") + bytes([done])
    rows = engine.local.comms.gather(mine)
    where = [(r, int.from_bytes(row[:8], "little"), bool(row[8])) for r, row in enumerate(rows)]
    over = [f"rank {r} at step {s}" for r, s, d in where if d]
    going = [f"rank {r} at step {s}" for r, s, d in where if not d]
    return UsageError(
        f"uneven batches: finished the block: {', '.join(over) or 'none'}; at a commit: {', '.join(going) or 'none'}. Every rank must "
        "commit the same number of steps: drop the last batches (drop_last=True), pad, or end the loop by session.step"
    )
