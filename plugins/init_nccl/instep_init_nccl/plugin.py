"""``init_nccl``: NCCL communicators from the address book, with computed unique ids and one mini root a rank."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from instep.agent.channel import inherited
from instep.hooks import CommsRequest, Communicator, Job, Plugin, hookimpl
from instep_init_nccl import exports
from instep_init_nccl.efa import require
from instep_init_nccl.machine import Machine

NAME = "init_nccl"
BACKEND = "nccl"


class InitNccl(Plugin):
    """One mini root for the life of the process; every communicator is joined by an id that each member computes."""

    HOOK_API: ClassVar[int] = 1

    efa: bool = Field(default=False, description="data goes over EFA: check that it is there, export what libfabric and NCCL need for it")
    variables: Mapping[str, str] = Field(default={}, description="variables for the workers, above the plugin's own and below the shell's")

    @hookimpl
    def environment(self) -> Mapping[str, str]:
        """What torch, NCCL and libfabric read when they are loaded."""
        return exports.environment(efa=self.efa, variables=self.variables, machine=Machine(environ=inherited()))

    @hookimpl
    def start(self, job: Job) -> None:
        """Make sure that EFA is there, if the settings name it."""
        if self.efa:
            require(job.rank, Machine(environ=inherited()))

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        """Connect the groups of the request; every other backend is left to its own plugin."""
        return None
