"""What stands in for the parts of a real rank that hold threads, sockets or tensors: gate, unwinder, comms, barrier."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from instep.errors import CommsError, Interrupted
from instep.testing.simulator.network import Barrier
from instep.testing.simulator.plugin import SLICE
from instep.torch.unwind import Sections

if TYPE_CHECKING:
    from instep.testing.simulator.rank import Rank

_NOTICE = 1.0
"""Seconds that a failed operation waits for the notice of its cause, as in ``instep.torch.gate``."""


class Gate:
    """Stands in for ``instep.torch.gate.Gate``: collectives that can be failed."""

    def __init__(self, rank: "Rank", *, loopback: bool) -> None:
        self._rank = rank
        self.loopback, self.body, self.recording, self.broken = loopback, False, False, False

    def check(self) -> None:
        """Raise ``Interrupted`` when the communicators are out of date."""
        self._rank.board.check()

    @contextmanager
    def waiting(self, label: str, sequence: int) -> Iterator[None]:
        """Show that main waits for its peers."""
        words = self._rank.standing.header
        words.operation(label)
        words.put("sequence", sequence)
        words.put("waiting", 1)
        try:
            yield
        finally:
            words.put("waiting", 0)

    def failed(self, label: str) -> None:
        """Answer a failed operation: ``Interrupted`` if its cause becomes known soon, else ``CommsError``."""
        self.broken = True
        if self._rank.board.noticed_within(_NOTICE):
            raise Interrupted(label)
        raise CommsError(f"{label}: connection closed")


class Unwinder(Sections):
    """Stands in for ``instep.torch.unwind.Unwinder``: main may be interrupted in the script's own code, outside masked sections."""

    def __init__(self, rank: "Rank") -> None:
        super().__init__()
        self._rank, self._insists = rank, False

    def reset(self) -> None:
        """Main unwound to the block."""
        self._masked, self._insists = 0, False

    def stepped(self) -> None:
        """A step was committed."""

    def insist(self) -> None:
        """Main has not acknowledged."""
        self._insists = True

    def lands(self) -> bool:
        """Whether an interruption lands now, as the real signal handler decides."""
        board = self._rank.board
        if not self._insists or self._masked or not self._rank.engine.running:
            return False
        return board.revoked and board.acknowledged < board.target


class Comms:
    """Stands in for ``instep.torch.comms.Comms``."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather byte strings over the world."""
        values = self._rank.collective("gather", data)
        return [cast("bytes", values[rank]) for rank in range(self._rank.world_size)]


class Followers:
    """Stands in for ``instep.torch.followers.Followers``: nothing is detected but by the agent, and every rank holds all."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank

    def detect(self) -> None:
        """Nothing."""

    def committed(self, step: int) -> None:  # noqa: ARG002 - the rank knows
        """One more step is complete here."""
        self._rank.world.checks.committed(self._rank)

    def keep(self, step: int) -> None:
        """No copies."""

    def settled(self, seconds: float) -> bool:  # noqa: ARG002
        """Nothing to wait for."""
        return True


class Config:
    """The part of the configuration that engine and commit look at."""

    drill = None


class NodeBarrier(Barrier):
    """The barrier of the machine; whoever arrives acts in an incarnation."""

    def __init__(self, rank: "Rank") -> None:
        super().__init__(rank.world.network.barrier, rank=rank.rank, world=rank.world_size)
        self._of = rank

    def arrive(self, incarnation: int, code: int) -> None:
        """Tell the others that this rank is there."""
        self._of.world.checks.acts(self._of.process, incarnation)
        super().arrive(incarnation, code)

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have arrived; until there is news, which ends the wait, it may be longer than asked."""
        return super().wait(seconds if self._of.board.revoked else SLICE)
