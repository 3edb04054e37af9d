"""What one rank's root has heard, and what follows from it: pure state, no socket and no thread.

A root of one rank hears two messages for each communicator, from its own rank and from the next one, and answers one. The next rank may
be early: it is remembered until the own rank comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from instep_init_nccl.bootstrap import INFO, SIZES, Hello, opening
from instep_init_nccl.ids import is_older

EARLY = 4096
"""Hellos of communicators that the own rank has not asked for yet; one for each group and pair is usual."""
_TRUNCATED = INFO + 1


@dataclass(frozen=True)
class Answer:
    """Bytes for the own rank, which waits at ``address``."""

    address: tuple[str, int]
    data: bytes


@dataclass
class _Meeting:
    own: Hello | None = None
    next: bytes | None = None


@dataclass
class Meetings:
    """The communicators of one rank that are being joined. ``dropped`` counts hellos that were of no use, ``served`` answers."""

    incarnation: int = 0
    dropped: int = 0
    served: int = 0
    _open: dict[int, _Meeting] = field(default_factory=dict)
    _early: dict[int, bytes] = field(default_factory=dict)
    _over: list[int] = field(default_factory=list)

    def expect(self, magic: int) -> None:
        """The own rank is about to join the communicator of this magic."""
        self._open[magic] = _Meeting(next=self._early.pop(magic, None))

    def advance(self, incarnation: int) -> list[Answer]:
        """Forget whatever is older than ``incarnation``; the answers are those of ``give_up``."""
        self.incarnation = incarnation
        self._early = {magic: info for magic, info in self._early.items() if not is_older(magic, incarnation)}
        return self.give_up([magic for magic in self._open if is_older(magic, incarnation)])

    def give_up(self, magics: Sequence[int] | None = None) -> list[Answer]:
        """The own rank joins these communicators (all, if none are named) no more: answers that make it give up where it waits already.

        It is told of a message longer than it can take, which NCCL answers with an error. Nothing else ends its wait.
        """
        left = {magic: self._open.pop(magic).own for magic in list(self._open if magics is None else magics)}
        waiting = {magic: own for magic, own in left.items() if own is not None}
        # An own hello may still be on its way.
        self._over = [*self._over, *(left.keys() - waiting.keys())][-EARLY:]
        return [_refusal(magic, own) for magic, own in waiting.items()]

    def hear(self, magic: int, payload: bytes) -> Answer | None:
        """Take in one hello. The answer to the own rank, once both have come."""
        if len(payload) not in SIZES or (is_older(magic, self.incarnation) and magic not in self._over):
            self.drop()
            return None
        hello = Hello.decode(payload)
        if magic in self._over:
            self.drop()
            return _refusal(magic, hello) if hello.rank == hello.root else None
        alone = hello.ranks == 1
        if hello.roots != hello.ranks or hello.root not in range(hello.roots) or hello.rank not in (hello.root, hello.root + 1):
            self.drop()
            return None
        own = hello.rank == hello.root
        meeting = self._open.get(magic)
        if meeting is None:
            if own or len(self._early) >= EARLY:
                self.drop()
                return None
            self._early[magic] = hello.info
            return None
        if own:
            meeting.own = hello
        if not own or alone:
            meeting.next = hello.info
        if meeting.own is None or meeting.next is None:
            return None
        del self._open[magic]
        self.served += 1
        return Answer(meeting.own.address, opening(magic, meeting.next))

    def drop(self) -> None:
        """Count a message that is of no use."""
        self.dropped += 1


def _refusal(magic: int, own: Hello) -> Answer:
    return Answer(own.address, opening(magic, b"", length=_TRUNCATED))
