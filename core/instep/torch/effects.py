"""Effects that reach outside of the job, such as a line in a log: each happens once, though the step that has it may run again.

A run that is repeated is the run that was cut, bit for bit, so its effects come in the same order: a number tells which have happened.
How many that were is kept in the rank's record, which outlives its process; where the repeated run stands is private state.
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
_COUNT = struct.Struct("<Q")


class Effects:
    """The effects of one rank. ``position``: how many of them the present run has come by; record it, and set it back with the rest."""

    def __init__(self, session: "Session") -> None:
        channel = Environment.read().channel
        if channel is None:
            raise InstepError("effects are counted in the record of a rank, and only `instep run` gives one")
        self._record, self._library = channel.record, session._engine.unwinder.library
        self.position = 0

    @property
    def happened(self) -> int:
        """How many have happened in the job."""
        return int(_COUNT.unpack(os.pread(self._record, _COUNT.size, _AT))[0])

    def once(self, effect: Callable[[], object]) -> None:
        """Let the next effect happen unless it has. A rank killed between an effect and this note of it repeats that one."""
        number = self.position
        if number >= self.happened:
            with self._library():
                effect()
                os.pwrite(self._record, _COUNT.pack(number + 1), _AT)
        self.position = number + 1
