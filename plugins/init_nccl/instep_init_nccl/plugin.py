"""``init_nccl``: NCCL communicators from the address book, with computed unique ids and one mini root a rank."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PrivateAttr

from instep.agent.channel import inherited
from instep.errors import InstepError
from instep.hooks import CommsRequest, Communicator, Interruption, Job, Plugin, hookimpl
from instep.model import Group, Json, Unrecoverable, Vote
from instep_init_nccl import exports
from instep_init_nccl.efa import require
from instep_init_nccl.machine import Machine

if TYPE_CHECKING:
    from instep_init_nccl.ranks import NcclRank

NAME = "init_nccl"
BACKEND = "nccl"


class InitNccl(Plugin):
    """One mini root for the life of the process; every communicator is joined by an id that each member computes.

    Nothing is opened until a group asks for NCCL.
    """

    HOOK_API: ClassVar[int] = 1

    efa: bool = Field(default=False, description="data goes over EFA: check that it is there, export what libfabric and NCCL need for it")
    variables: Mapping[str, str] = Field(default={}, description="variables for the workers, above the plugin's own and below the shell's")
    port: int | None = Field(default=None, ge=1, le=65535, description="port of local rank 0, the next one for rank 1; none: any free one")
    connect_timeout: float = Field(default=10.0, gt=0, description="seconds that connecting one group may take")
    operation_timeout: float = Field(default=1800.0, gt=0, description="seconds that one collective may take, unless its group says so")
    abort_timeout: float = Field(default=5.0, gt=0, description="seconds that aborting all communicators may take")
    eager: bool = Field(default=True, description="connect in the recovery; else with the first collective, as stock torch does")
    revoke: bool = Field(default=True, description="before the abort, stop what is in flight (ncclCommRevoke), where NCCL has it")
    share_gpus: bool = Field(default=False, description="several ranks on one GPU, for tests (NCCL 2.30 and later)")

    _job: Job | None = PrivateAttr(default=None)
    _nccl: "NcclRank | None" = PrivateAttr(default=None)

    @hookimpl
    def environment(self) -> Mapping[str, str]:
        """What torch, NCCL and libfabric read when they are loaded."""
        return exports.environment(efa=self.efa, variables=self.variables, machine=Machine(environ=inherited()))

    @hookimpl
    def start(self, job: Job) -> None:
        """Make sure that EFA is there, if the settings name it."""
        self._job = job
        if self.efa:
            require(job.rank, Machine(environ=inherited()))

    @hookimpl
    def announce(self, groups: Sequence[Group]) -> Mapping[str, Json] | None:
        """Where the mini root of this rank listens, and which NCCL it has; nothing as long as no group asks for NCCL."""
        return self._opened().note() if any(group.backend == BACKEND for group in groups) else None

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """Abort the communicators of older incarnations."""
        if self._nccl is not None:
            self._nccl.quiesce(interruption.incarnation)

    @hookimpl
    def plan(self, votes: Sequence[Vote]) -> Unrecoverable | None:
        """In the agent: whether torch has room for one more backend of each group; the next rung if not."""
        from instep_init_nccl.swaps import exhausted

        return exhausted(votes, NAME)

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        """Connect the groups of the request; every other backend is left to its own plugin."""
        return self._opened().connect(request) if request.backend == BACKEND else None

    @hookimpl
    def close(self) -> None:
        """Close the mini root; communicators end with the process."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    def _opened(self) -> "NcclRank":
        from instep_init_nccl.connect import Limits
        from instep_init_nccl.ranks import Choices, NcclRank

        if self._job is None:
            raise InstepError(f"{NAME}: start was not called; groups can be made after instep.init()")
        if self._nccl is None:
            limits = Limits(self.connect_timeout, self.operation_timeout, self.abort_timeout, self.eager)
            self._nccl = NcclRank(self._job, Choices(self.port, self.share_gpus, self.revoke, limits), plugin=NAME)
        return self._nccl
