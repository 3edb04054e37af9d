"""What sharded training frameworks tell about their state: shard groups, and an update that is split around the commit's barrier.

``session.protect(training=Adapter(...))`` takes an adapter in charge of a model and its optimizer. Its optimizer's step, called inside
``with session.commit()``, runs in parts: prepare (collectives allowed) → ``port.update()``: record and barrier, then the local update
→ ``port.publish()``: collectives that hand the updated shards out, which can be repeated → the rest of the body.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from instep.torch.private import Stateful

Tree = dict[str, object]
"""``kinds`` (name → text that must be equal), ``tensors`` and ``buffers`` (name → tensor that exists on every replica), ``objects``
(name → tree of what the codec knows; tensors in it may come and go)."""


def tree(
    *,
    kinds: Mapping[str, str] = {},
    tensors: Mapping[str, object] = {},
    buffers: Mapping[str, object] = {},
    objects: Mapping[str, object] = {},
) -> Tree:
    """A tree with all four branches."""
    return {"kinds": dict(kinds), "tensors": dict(tensors), "buffers": dict(buffers), "objects": dict(objects)}


def name(what: str, replicas: Sequence[int]) -> str:
    """The name of a shard group: what it is, and the lowest of its ranks, which no other group of its kind has."""
    return f"{what}@{min(replicas)}"


class ShardGroup(Protocol):
    """A piece of shared state of which all ranks in ``replicas`` hold bitwise equal copies."""

    @property
    def name(self) -> str:
        """As ``name()`` makes it: equal on all replicas, unique in the job."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Global ranks, ascending, this one among them."""

    def tree(self) -> Tree:
        """The present state. Tensors are the live ones: contiguous ones are received into in place.

        The same object as before promises that nothing but the bytes of its tensors has changed.
        """

    def fit(self, theirs: Tree) -> Tree:
        """Own tree for a donor's to be laid over. Raises ``UsageError`` if that cannot be this rank's state; changes nothing."""

    def load(self, tree: Tree) -> None:
        """Take a donor's state over. What is under ``tensors`` and ``buffers`` has been written in place already."""


class Port(Protocol):
    """The commit as an adapter sees it."""

    def update(self) -> AbstractContextManager[None]:
        """With gradients ready: record private state and pass the barrier; inside, only local updates may stand. Once a commit.

        Raises ``Interrupted`` on entry when the step is to be repeated.
        """

    def publish(self, run: Callable[[], object]) -> None:
        """Behind ``update``: run the collectives that hand out what was updated; when a fault cuts them, the recovery publishes."""


@runtime_checkable
class Adapter(Protocol):
    """A framework's model and optimizer, protected together."""

    def attach(self, port: Port, *, rank: int, world_size: int) -> None:
        """Split the optimizer's step around ``port``, on instances only. Called once, by ``session.protect``."""

    def groups(self) -> Sequence[ShardGroup]:
        """All shard groups of this rank, in one order; called once, when everything is built and protected."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Modules whose buffers and training flags are private."""

    def private(self) -> Mapping[str, Stateful]:
        """What changes outside of the commit, as scalers and generators do; kept in the rank's own record."""

    def publish(self) -> None:
        """In every recovery, on all ranks, after the restore: derive parameters from restored shards, and hand them out. Collective."""

    def reset(self) -> None:
        """On a survivor: forget the step that was cut. Local, and may be repeated."""


@runtime_checkable
class Covering(Adapter, Protocol):
    """An adapter that sees to parameters of modules which are protected beside it."""

    def covers(self) -> Sequence[Tensor]:
        """Parameters that are in its groups on some rank, and that ``publish`` brings to all others: nothing else sends them."""
