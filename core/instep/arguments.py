"""What hooks are given: the job, an interruption, groups to connect, an attempt of a recovery and the state in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from instep.model import AddressBook, Fault, Group, Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Job:
    """The job as one rank sees it at its start. ``secret`` is shared by all ranks of the job and by nobody else.

    ``holding`` is what the rank holds, from its first block on.
    """

    rank: int
    world_size: int
    local_rank: int
    birth: int
    host: str
    secret: bytes
    holding: "Holding | None" = None


@dataclass(frozen=True)
class Interruption:
    """A fault somewhere: nothing older than ``incarnation`` may act any more. ``acknowledging`` is true in the last call."""

    incarnation: int
    fault: Fault
    acknowledging: bool


class Communicator(Protocol):
    """One process group inside a handle, for one incarnation."""

    @property
    def group(self) -> "ProcessGroup":
        """The stock process group that runs the collectives."""

    def abandon(self) -> Callable[[], bool]:
        """Give the communicator up without blocking. The result tells whether all its operations have ended."""


@dataclass(frozen=True)
class GroupOptions:
    """What the script gave for one process group: seconds that an operation may take, and torch's own options for the backend, if any."""

    timeout: float
    backend: object = None


@dataclass(frozen=True)
class CommsRequest:
    """Groups to connect for one backend. ``check`` raises ``Interrupted`` once the incarnation is out of date.

    ``options`` are by the name of the group, for those that have any.
    """

    backend: str
    rank: int
    incarnation: int
    groups: Sequence[Group]
    book: AddressBook
    check: Callable[[], None]
    options: Mapping[str, GroupOptions] = field(default_factory=dict)


class Kept(Protocol):
    """What a rank has put beside its live state, and had others put beside theirs."""

    def settled(self, seconds: float) -> bool:
        """Whether the last ``keep`` is done, wherever its copies go; waits up to ``seconds``. Raises what kept it from being done."""

    def copies(self) -> Mapping[str, tuple[int, ...]]:
        """The steps of which there is a complete copy here, by shard group, other ranks' too; nothing is added until the next ``keep``."""


class SharedState(Protocol):
    """One shard group's state on this rank, as a schema (bytes) and a flat list of contiguous tensors.

    All ranks in ``replicas`` hold equal bytes of it. ``name`` is the same on all of them and on no other rank. ``layouts`` tells whether
    every replica must learn the donor's schema and ``align`` to it, though it restores nothing.
    """

    @property
    def name(self) -> str:
        """Key of this group in ``Plan.donors``."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Global ranks with equal copies, ascending, this one among them."""

    @property
    def layouts(self) -> bool:
        """Whether the schema carries gradient bucket layouts."""

    def present(self) -> tuple[object, list[object]]:
        """The live tree of the state, which does not change until the next commit, and bucket layouts, ``None`` for one not known yet.

        Quick, and leaves the rank as it is; main thread only.
        """

    def describe(self) -> tuple[bytes, Sequence["Tensor"]]:
        """Donor: the schema of all shared state, and its tensors in schema order."""

    def destination(self, schema: bytes, *, staged: bool) -> Sequence["Tensor"]:
        """Receiver: tensors to receive into, in schema order; own ones where they fit, unless ``staged``."""

    def accept(self) -> None:
        """Receiver: take over what arrived in the tensors of the last ``destination``."""

    def align(self, schema: bytes) -> None:
        """Every rank: bring reducers to the donor's gradient bucket layout."""

    def digest(self) -> int:
        """Order-sensitive 64-bit digest of all shared state."""


class Holding(Protocol):
    """Everything that one rank holds at its last commit, for plugins that keep copies of it. Call it in the main thread only."""

    @property
    def block(self) -> int:
        """Number of the present block, from 0."""

    @property
    def settled(self) -> bool:
        """Whether the state is all there is: no reducer is about to change its layout, and all of an update was published."""

    def shards(self) -> Sequence[SharedState]:
        """The shard groups of this rank, the world's first. Only ``describe`` and ``digest`` leave the rank as it is."""

    def record(self, step: int) -> bytes:
        """Private state as it was recorded for ``step``, one of the last two. Raises ``InstepError`` when the record lacks it."""

    @property
    def loads(self) -> bool:
        """Whether the script gave a function that loads its own checkpoints."""

    def load(self, step: int | None) -> int:
        """Have the script load its newest checkpoint, or that of ``step``, on all ranks together; the steps done by then.

        What it leaves becomes the recorded private state of that step. Raises what the script raises.
        """

    def take(self, step: int, record: bytes) -> None:
        """Make ``record`` the private state of ``step``, to be loaded next; shared state of that step was accepted before.

        Raises ``InstepError`` when it is damaged or of another script.
        """


@dataclass(frozen=True)
class Recovery:
    """One attempt of a recovery on one rank, handed to each phase after the communicators are up.

    ``shards`` are the shard groups that this rank is a replica of; ranks may have different ones, and in a sharded job they do.
    ``check`` raises ``Interrupted`` once a newer fault is known: call it in every wait. ``gather`` is a world all-gather of
    short byte strings of equal length. ``point`` names a place where a test may inject a fault.
    """

    plan: Plan
    rank: int
    fresh: bool
    torn: bool
    secret: bytes
    shards: Sequence[SharedState]
    check: Callable[[], None]
    gather: Callable[[bytes], Sequence[bytes]]
    point: Callable[[str], None]
    deadline: float
