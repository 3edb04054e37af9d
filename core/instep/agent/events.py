"""What goes into the coordinator and what comes out: the whole interface between decisions and the machine."""

from dataclasses import dataclass, field

from instep.messages import Message
from instep.model import Fault, IncidentReport

# ---- in


@dataclass(frozen=True)
class Born:
    """The process of a birth exists."""

    rank: int
    birth: int


@dataclass(frozen=True)
class Received:
    """A message of a worker."""

    rank: int
    birth: int
    message: Message


@dataclass(frozen=True)
class Died:
    """A process is certainly dead. ``code`` is its exit code, negative for a signal, ``None`` when nobody could tell."""

    rank: int
    birth: int
    code: int | None


@dataclass(frozen=True)
class Hung:
    """The watchdog's verdict on one rank. ``dump``: its stacks can be asked for before it is killed."""

    rank: int
    birth: int
    why: str
    dump: bool


@dataclass(frozen=True)
class Stuck:
    """The watchdog's verdict on the job: all ranks wait for each other, as ``table`` shows."""

    table: str


@dataclass(frozen=True)
class Detected:
    """A plugin's ``detect`` hook found a fault."""

    fault: Fault


@dataclass(frozen=True)
class ServerDied:
    """The fork server is gone, and its workers with it."""

    why: str


@dataclass(frozen=True)
class Cleared:
    """Answers ``Restart``: no process of the job is left."""


@dataclass(frozen=True)
class Woken:
    """Answers ``Wake``."""


Event = Born | Received | Died | Hung | Stuck | Detected | ServerDied | Cleared | Woken


# ---- out


@dataclass(frozen=True)
class Spawn:
    """Start a birth of a rank. ``restart`` counts restarts of the whole job."""

    rank: int
    birth: int
    restart: int


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    rank: int
    message: Message


@dataclass(frozen=True)
class Kill:
    """Kill a birth of a rank; ``dump`` asks it for its stacks first."""

    rank: int
    birth: int
    why: str
    dump: bool


@dataclass(frozen=True)
class Restart:
    """Kill every process of the job, answer ``Cleared``, and give the next births new channels and records."""

    why: str


@dataclass(frozen=True)
class Wake:
    """Answer ``Woken`` after ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Report:
    """An incident is over."""

    incident: IncidentReport


@dataclass(frozen=True)
class Log:
    """One line for the console."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the job with an exit code. ``rank`` is the one whose log tells more, if any."""

    code: int
    message: str = ""
    rank: int | None = field(default=None)


Action = Spawn | Send | Kill | Restart | Wake | Report | Log | Finish
