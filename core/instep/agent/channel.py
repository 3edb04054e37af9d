"""What the agent's launch code puts into a worker's environment, read once by the worker."""

import os
from dataclasses import dataclass
from typing import Self

from instep.agent.barrier import BarrierFds

CHANNEL = "INSTEP_CHANNEL"
BIRTH = "INSTEP_BIRTH"


def inherited() -> dict[str, str]:
    """The environment of this process without the channel: for processes that it starts and that are not this rank."""
    return {name: value for name, value in os.environ.items() if name not in {CHANNEL, BIRTH}}


@dataclass(frozen=True)
class Channel:
    """File descriptors that a worker inherits: control socket, record, tape of set-up results, and the barrier of the machine."""

    control: int
    record: int
    setup: int
    barrier: BarrierFds


@dataclass(frozen=True)
class Environment:
    """Rank and world of this process as torchrun names them, and the channel to the agent, if ``instep run`` started it."""

    rank: int
    world_size: int
    local_rank: int
    birth: int
    channel: Channel | None

    @classmethod
    def read(cls) -> Self:
        """Read the environment of this process."""
        env = os.environ
        channel = None
        if CHANNEL in env:
            control, record, setup, *barrier = (int(part) for part in env[CHANNEL].split(","))
            channel = Channel(control, record, setup, BarrierFds(*barrier))
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            birth=int(env.get(BIRTH, "0")),
            channel=channel,
        )
