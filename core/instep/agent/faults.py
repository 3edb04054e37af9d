"""Deaths in words, and the faults they are."""

import signal

from instep.model import Fault


def describe(rank: int, code: int | None) -> str:
    """How a rank ended, for people: exit code or signal with its name."""
    if code is None:
        return f"rank {rank} died, nobody could tell how"
    if code >= 0:
        return f"rank {rank} exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"rank {rank} was killed by signal {-code} ({name})"


def shell_code(code: int | None) -> int:
    """The code that a shell shows: 128 + signal for a signal, 1 when unknown."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code


def of_death(rank: int, code: int | None, *, step: int, at: float, hung: str | None) -> Fault:
    """The fault behind a death; ``hung`` tells why the agent killed the rank, if it did."""
    how = "unknown" if code is None else code
    return Fault(
        kind="exit" if hung is None else "hang",
        ranks=(rank,),
        detail=describe(rank, code) if hung is None else f"rank {rank} hung: {hung}",
        detected_by="agent" if hung is None else "watchdog",
        at=at,
        signature=f"{rank}:exit:{how}:{step}" if hung is None else f"{rank}:hang:{step}",
    )
