"""Values that cross hooks and processes: frozen, checked, and the same on every rank."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

Json = JsonValue
FaultKind = Literal["exit", "exception", "hang", "plugin"]
Scope = Literal["in_process", "checkpoint", "job"]


class Value(BaseModel):
    """Base of all values: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(Value):
    """Something that went wrong on one or more ranks; opens an incident.

    ``signature`` is equal for faults that look alike (rank, exception type, step): three without a committed step stop the job.
    ``at`` is a monotonic time in seconds: of the injection if known, else of the first evidence.
    """

    kind: FaultKind
    ranks: tuple[int, ...]
    detail: str
    detected_by: str
    at: float
    signature: str = ""


class Address(Value):
    """Where the peers of a rank find it: one host, and one port for each plugin that listens."""

    rank: int
    birth: int
    host: str
    ports: Mapping[str, int] = {}


class Group(Value):
    """A process group: its c10d name, the global ranks in group order, and the backend asked for."""

    name: str
    ranks: tuple[int, ...]
    backend: str


class AddressBook(Value):
    """All that is needed to connect an incarnation, without asking anybody.

    ``notes[rank][plugin]`` is what that rank's plugin returned from ``announce`` for its peers.
    """

    incarnation: int
    addresses: tuple[Address, ...]
    notes: tuple[Mapping[str, Json], ...] = ()


class Status(StrEnum):
    """What a rank holds when it votes (architecture: commit, votes, plan)."""

    CLEAN = "clean"
    PREPARED = "prepared"
    APPLIED = "applied"
    UNPUB = "unpub"
    TORN = "torn"
    FRESH = "fresh"


class Vote(Value):
    """One rank's acknowledgement that it is quiet, and what it holds.

    ``step`` counts committed steps: a rank that is ``clean`` at s holds shared state after s commits. ``groups`` are the process
    groups it is a member of, in the order it made them; ``shards`` maps each shard group of its state to the ranks with bitwise equal
    copies; ``copies`` maps shard groups, own ones and others', to the steps of which it keeps a complete copy beside the live state.
    """

    rank: int
    birth: int
    incarnation: int
    block: int
    step: int
    status: Status
    groups: tuple[Group, ...]
    address: Address
    shards: Mapping[str, tuple[int, ...]] = {}
    copies: Mapping[str, tuple[int, ...]] = {}
    notes: Mapping[str, Json] = {}


class ShardSize(Value):
    """A shard group as a rank knows it: who has equal copies, and the bytes of the tensors of one."""

    replicas: tuple[int, ...]
    bytes: int


class Role(StrEnum):
    """What a rank does with its shared state in a recovery."""

    KEEP = "keep"
    ROLL_FORWARD = "roll_forward"
    RESTORE = "restore"


class Plan(Value):
    """The outcome of a vote, equal on every rank: which step goes on, who restores, who donates, who is where.

    ``donors`` maps each shard group to the ranks that send it, ascending; empty where nobody restores it. They send the shard groups
    in ``copied`` from their copies of ``step``, all others from what is live; a donor that restores the group itself takes its own copy.
    ``checkpoint`` names the one that all ranks load instead,
    ``skipped`` tells why newer ones are not loaded.
    """

    incarnation: int
    block: int
    step: int
    roles: tuple[Role, ...]
    donors: Mapping[str, tuple[int, ...]]
    book: AddressBook
    copied: tuple[str, ...] = ()
    checkpoint: str = ""
    skipped: tuple[str, ...] = ()


class Unrecoverable(Value):
    """The votes leave no way to go on in process; ``why`` names the piece of state that nobody holds, ``checkpoint`` why none is loaded."""

    incarnation: int
    why: str
    checkpoint: str = ""


class Receipt(Value):
    """What one phase did on one rank. Seconds of wall time, bytes received or moved; ``step``: that was restored, if not the plan's."""

    phase: str
    plugin: str
    rank: int
    seconds: float
    bytes: int = 0
    verified: bool = False
    step: int | None = None


class Attempt(Value):
    """One try of a recovery: its incarnation, the fault that opened it, and the phase it failed in, if any."""

    incarnation: int
    fault: Fault
    failed_phase: str | None = None


class IncidentReport(Value):
    """One line of ``incidents.jsonl``: from the first fault until all ranks have committed again."""

    incident: int
    fault: Fault
    attempts: tuple[Attempt, ...]
    scope: Scope
    step: int
    steps_lost: int
    phases: tuple[Receipt, ...]
    seconds_to_resume: float | None
    seconds_to_step: float | None
    bytes_moved: int
    verified: bool
