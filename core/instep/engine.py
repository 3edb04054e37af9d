"""The engine behind a session: the state machine of blocks and commits on one rank, which both of them drive."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from instep.agent.records import State
from instep.errors import UsageError
from instep.messages import Done, Fatal
from instep.model import Status
from instep.torch.local import LocalRank
from instep.torch.reset import Modes

if TYPE_CHECKING:
    from instep.board import Board
    from instep.lifecycle import Lifecycle
    from instep.standing import Standing
    from instep.torch.gate import Gate
    from instep.torch.state import RankState
    from instep.torch.unwind import Unwinder


class BlockEnd(BaseException):
    """Leaves the block as if its function had returned; a drill has reached its last step."""


class Engine:
    """One rank between its set-up and its end.

    ``running``: a block is running; ``entered``: one was entered; ``first_commit``: the next commit is the first after a join;
    ``start``: the step that the script began with;
    ``cut``: the block was left by an exception such as KeyboardInterrupt, which is a death in the block.
    What a commit looks at is an attribute here, not a property: it is asked for some forty times a step.
    """

    def __init__(self, local: LocalRank) -> None:
        self.local = local
        self.clock: Callable[[], float] = time.monotonic
        self.running = self.entered = self.first_commit = self.cut = False
        self._modes = Modes.capture()
        self.start = local.standing.step
        self.rank, self.world_size = local.rank, local.world_size
        local.join(self)
        self.board: Board = local.board
        self.standing: Standing = local.standing
        self.gate: Gate = local.gate
        self.state: RankState = local.state
        self.unwinder: Unwinder = local.unwinder
        self.lifecycle: Lifecycle = local.lifecycle
        self.tell, self.point = local.tell, local.point

    @property
    def step(self) -> int:
        """Number of steps committed so far."""
        return self.standing.step

    @property
    def fresh(self) -> bool:
        """Whether this process replaces a rank and has not joined yet."""
        return self.standing.status is Status.FRESH

    def finished(self, block: int) -> Done | None:
        """The recorded result of a block that the predecessor has left, for a replacement."""
        return next((d for d in self.local.finished if d.block == block), None) if self.fresh else None

    def enter(self) -> None:
        """Enter a block on a rank that is in step: record the private state it starts from."""
        if not self.entered:
            self._modes = Modes.capture()
            self.start = self.local.begin()
            self.local.agree()
            self.entered = self.first_commit = True
        self.gate.recording = False
        if self.state.ledger is not None:
            self.state.ledger.drop()
        with self.unwinder.library():
            self.state.private.write(self.step)
        self.local.followers.keep(self.step)
        self.local.mark_groups()

    def left(self) -> None:
        """All ranks were released from the block."""
        self.local.unmake_groups()
        self.state.dump()
        self.standing.block += 1
        self.standing.at(State.OUTSIDE)
        self.gate.recording = True

    def unwound(self) -> None:
        """Clean up after the block was cut, before voting."""
        self.local.unwound(self._modes)

    def rejoined(self) -> None:
        """A recovery ended well: this rank is in step again."""
        if not self.entered:
            self._modes = Modes.capture()
        self.entered = self.first_commit = True
        self.gate.recording = False

    def end_at_limit(self) -> None:
        """In a drill: leave the block once its last step is committed."""
        drill = self.local.config.drill
        if drill is not None and drill.steps is not None and self.step >= drill.steps:
            raise BlockEnd

    def off_main_thread(self, what: str) -> None:
        """Raise ``UsageError`` unless the caller is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"{what} runs in thread {threading.current_thread().name!r}: only the main thread can be unwound, so train there"
            )

    def fatal(self, error: BaseException) -> None:
        """End the whole job because of this error or exit."""
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            self.tell(Fatal(message=f"rank {self.rank} called sys.exit({error.code}) inside a block at step {self.step}", code=code))
        else:
            self.tell(Fatal(message=f"rank {self.rank}: {error}"))
