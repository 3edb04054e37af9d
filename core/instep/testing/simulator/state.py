"""The state of a simulated rank: shared and private numbers, with the places in their writing where a rank may die."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from instep.hooks import CommsRequest
from instep.model import ShardSize
from instep.testing.simulator import model
from instep.testing.simulator.process import Process

if TYPE_CHECKING:
    from torch import Tensor

    from instep.testing.simulator.rank import Rank

REPLICA = "replica"
"""The one shard group: all ranks hold the same."""


class Private:
    """Stands in for ``instep.torch.private.Private``: one generator, kept in as many slots."""

    def __init__(self, process: Process, first: int) -> None:
        self.value = first
        self._process, self._written = process, first

    def draw(self) -> int:
        """One draw."""
        self.value = model.draw(self.value)
        return self.value

    def write(self, step: int) -> None:
        """Record the present state as the one of ``step``."""
        slots = self._process.memory.slots
        slots.begin(step)
        self._process.place("slot")
        slots.end(step, self.value)
        self._written = self.value

    def load(self, step: int) -> None:
        """Reload the state of ``step``."""
        self.value = self._process.memory.slots.load(step)

    def drew(self) -> bool:
        """Whether the generator moved since the last ``write``."""
        return self.value != self._written


class SharedParts:
    """``instep.hooks.SharedState`` of a simulated rank; the plugin moves the numbers by itself."""

    name, layouts = REPLICA, False

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank

    @property
    def replicas(self) -> tuple[int, ...]:
        """All ranks."""
        return self._rank.world.everyone

    def present(self) -> tuple[object, list[object]]:
        """There is no tree here."""
        return {}, []

    def describe(self) -> "tuple[bytes, Sequence[Tensor]]":
        """There are no tensors here."""
        return b"", ()

    def destination(self, schema: bytes, *, staged: bool) -> "Sequence[Tensor]":  # noqa: ARG002 - nothing arrives here
        """There are no tensors here."""
        return ()

    def accept(self) -> None:
        """Nothing is staged."""

    def align(self, schema: bytes) -> None:
        """There are no reducers."""

    def digest(self) -> int:
        """Digest of all shared state."""
        return model.mix(*self._rank.shared)


class _Reducers:
    """Stands in for ``instep.torch.shared.Shared``, as a commit uses it."""

    def prepare(self) -> None:
        """Nothing to note."""

    def commit(self) -> None:
        """Nothing to check."""

    def joining(self) -> bool:
        """Never."""
        return False


class RankState:
    """Stands in for ``instep.torch.state.RankState``."""

    ledger = None
    adapters = ()

    def __init__(self, rank: "Rank", private: Private) -> None:
        self.private, self.shared = private, _Reducers()
        self._rank = rank

    def sizes(self) -> dict[str, ShardSize]:
        """Nothing that anybody would look at."""
        return {}

    def share_moved(self) -> None:
        """There are no buffers."""

    def agree_on_moved(self, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """After the first commit: as the real one, a collective outside of every step."""
        gather(b"")

    def dump(self) -> None:
        """All ranks are released: this is how the block ended here."""
        self._rank.world.checks.left(self._rank, self._rank.standing.step)


class Idle:
    """The parts of ``instep.lifecycle.Local`` in which a simulated rank has nothing to do."""

    publishes = False

    def publish(self) -> None:
        """Nothing is derived."""

    def meanwhile(self, check: Callable[[], None], planned: Callable[[], bool]) -> None:
        """Nothing is worth doing ahead."""

    def install(self, request: CommsRequest, answer: tuple[str, object] | None) -> None:
        """The group is connected."""
