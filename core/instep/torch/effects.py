"""Effects that reach outside of the job, such as a line in a log: each happens once, though the step that has it may run again.

A run that is repeated is the run that was cut, bit for bit, so its effects come in the same order: a number tells which have happened.
How many that were is kept in the rank's record, which outlives its process; where the repeated run stands is private state.

A run that goes on from a checkpoint of somebody else's may come by fewer effects in its first step than the run that saved it. So effects
are told apart by their steps until it has caught up with what has happened.
"""

import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from instep.agent.channel import Environment
from instep.errors import InstepError

if TYPE_CHECKING:
    from instep.session import Session

_AT = 3072
"""In the header page of the record, behind its words and texts."""
_NOTE = struct.Struct("<QQQ")
"""How many have happened; the step of the last of them; how many had happened before that step."""
_BEHIND = -1


class Effects:
    """The effects of one rank. ``position``: how many of them the present run has come by; record it, and set it back with the rest."""

    def __init__(self, session: "Session") -> None:
        channel = Environment.read().channel
        if channel is None:
            raise InstepError("effects are counted in the record of a rank, and only `instep run` gives one")
        self._record, self._session, self._library = channel.record, session, session._engine.unwinder.library
        self._position = 0
        self._step, self._index = -1, 0

    @property
    def position(self) -> int:
        """How many the present run has come by; negative while it has not caught up with a run that it goes on from."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position, self._step = value, -1

    @property
    def happened(self) -> int:
        """How many have happened in the job."""
        return self._noted()[0]

    def rewind(self, step: int, position: int) -> None:
        """The run goes on at ``step`` from a checkpoint that was saved when it had come by ``position`` effects."""
        happened, last, before = self._noted()
        if last == step:
            self._note(happened, last, max(before, min(position, happened)))
        self.position = _BEHIND if happened else 0

    def once(self, effect: Callable[[], object]) -> None:
        """Let the next effect happen unless it has. A rank killed between an effect and this note of it repeats that one."""
        happened, last, before = self._noted()
        step = self._session.step
        number = self._position if self._position >= 0 else self._caught_up(step, happened, last, before)
        if number >= happened:
            with self._library():
                effect()
                self._note(number + 1, step, before if step == last and happened else number)
        elif self._position < 0:
            return
        self._position = number + 1

    def _caught_up(self, step: int, happened: int, last: int, before: int) -> int:
        """The number of the next effect, or of any that has happened."""
        if step != self._step:
            self._step, self._index = step, 0
        self._index += 1
        if step == last:
            return before + self._index - 1
        return happened if step > last else happened - 1

    def _noted(self) -> tuple[int, int, int]:
        happened, last, before = _NOTE.unpack(os.pread(self._record, _NOTE.size, _AT))
        return happened, last, before

    def _note(self, happened: int, last: int, before: int) -> None:
        os.pwrite(self._record, _NOTE.pack(happened, last, before), _AT)
