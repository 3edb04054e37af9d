"""What agent and workers tell each other: length-prefixed JSON over an inherited socket pair."""

import socket
import struct
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from instep.errors import InstepError
from instep.model import Address, AddressBook, Fault, Json, Plan, Receipt, ShardSize, Value, Vote

LIMIT = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class Injection(Value):
    """A fault that a drill or a test places: rank ``rank`` does ``kind`` at ``point`` of ``step``, once.

    ``birth`` limits it to one birth of the rank, ``None`` to none.
    """

    id: int
    rank: int
    kind: Literal["kill", "raise", "hang"]
    step: int | None
    point: str
    birth: int | None = None


# ---- worker -> agent


class Hello(Value):
    """``init()`` was called; the worker is ready to be told about the job."""

    t: Literal["hello"] = "hello"
    rank: int
    birth: int
    address: Address
    notes: Mapping[str, Json] = {}


class Gather(Value):
    """A member of a new process group, made while the job is live, shares what its peers need to connect."""

    t: Literal["gather"] = "gather"
    incarnation: int
    key: str
    members: tuple[int, ...]
    rank: int
    notes: Mapping[str, Json]


class Voted(Value):
    """The vote: this rank is quiet."""

    t: Literal["voted"] = "voted"
    vote: Vote


class Joined(Value):
    """The rank is in step: after its first block entry (no receipts), or after a recovery."""

    t: Literal["joined"] = "joined"
    incarnation: int
    block: int
    step: int
    at: float
    receipts: tuple[Receipt, ...] = ()


class Committed(Value):
    """First commit after a join; later ones are read from the record. The very first tells the rank's ``shards`` by name."""

    t: Literal["committed"] = "committed"
    incarnation: int
    step: int
    at: float
    shards: Mapping[str, ShardSize] = {}


class Faulted(Value):
    """This worker saw a fault: an exception in its block, or a phase of the recovery that failed (``phase``)."""

    t: Literal["faulted"] = "faulted"
    incarnation: int
    fault: Fault
    phase: str | None = None


class Done(Value):
    """The rank finished its block; ``value`` is what the block returned if JSON can hold it (``plain``)."""

    t: Literal["done"] = "done"
    incarnation: int
    block: int
    step: int
    value: Json = None
    plain: bool = True


class Closed(Value):
    """The rank saw that all are done, and is still a donor."""

    t: Literal["closed"] = "closed"
    incarnation: int
    block: int


class Fired(Value):
    """An injection is about to fire; the agent never sends it again."""

    t: Literal["fired"] = "fired"
    id: int
    at: float


class Once(Value):
    """The result of a ``session.once`` call, kept for a replacement."""

    t: Literal["once"] = "once"
    index: int
    value: Json


class Fatal(Value):
    """The script broke the contract, or called ``sys.exit`` inside a block; the job ends with this message and exit code."""

    t: Literal["fatal"] = "fatal"
    message: str
    code: int = 1


# ---- agent -> worker


class Setup(Value):
    """The first message on every channel: the resolved configuration, and a secret (hex) of this job alone."""

    t: Literal["setup"] = "setup"
    config: Mapping[str, Json]
    secret: str


class Welcome(Value):
    """Answers ``Hello``: what a birth must know.

    ``book`` is the first address book (sent once all ranks have said hello), ``None`` for a replacement (sent at once).
    ``config`` is the resolved configuration, ``secret`` (hex) is shared by all ranks of the job.
    """

    t: Literal["welcome"] = "welcome"
    incarnation: int
    book: AddressBook | None
    config: Mapping[str, Json]
    secret: str
    once: tuple[Json, ...] = ()
    finished: tuple[Done, ...] = ()
    injections: tuple[Injection, ...] = ()


class Gathered(Value):
    """Answers ``Gather`` once every member has asked; ``notes`` in the order of the members."""

    t: Literal["gathered"] = "gathered"
    incarnation: int
    key: str
    notes: tuple[Mapping[str, Json], ...]


class Interrupt(Value):
    """A fault opened ``incarnation``: be quiet, then vote."""

    t: Literal["interrupt"] = "interrupt"
    incarnation: int
    fault: Fault


class Planned(Value):
    """All voted: the plan."""

    t: Literal["planned"] = "planned"
    plan: Plan


class Closing(Value):
    """All ranks are done with the block: acknowledge, keep donating."""

    t: Literal["closing"] = "closing"
    block: int


class Release(Value):
    """All ranks acknowledged: leave the block."""

    t: Literal["release"] = "release"
    block: int


Message = Annotated[
    Hello | Gather | Voted | Joined | Committed | Faulted | Done | Closed | Fired | Once | Fatal
    | Setup | Welcome | Gathered | Interrupt | Planned | Closing | Release,
    Field(discriminator="t"),
]  # fmt: skip
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message on the wire, length first."""
    body = message.model_dump_json().encode()
    if len(body) > LIMIT:
        raise InstepError(f"message {message.t!r} has {len(body)} bytes, the limit is {LIMIT}; keep block results and notes small")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages, however it was split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes. Raises ``InstepError`` when the stream is not ours."""
        self._buffer += data
        out: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LIMIT:
                raise InstepError(f"control socket: a message of {length} bytes announced, the limit is {LIMIT}")
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            out.append(_ADAPTER.validate_json(body))
        return out


def send(sock: socket.socket, message: Message) -> None:
    """Send one message, blocking until the kernel has it."""
    sock.sendall(encode(message))
