"""The plugin of the simulated job: communicators and transfers over the simulated network, with the duties of the real plugins.

One instance serves all ranks: it finds the rank by the thread that calls it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from instep.errors import CommsError, InstepError
from instep.hooks import CommsRequest, Communicator, Interruption, Plugin, Recovery, hookimpl
from instep.model import Group, Json, Receipt, Role
from instep.plugins import LoadedPlugins
from instep.testing.simulator.clock import here
from instep.testing.simulator.state import REPLICA

if TYPE_CHECKING:
    from instep.testing.simulator.rank import Rank

BACKEND = "simulated"
CONNECT, TRANSFER, SLICE = 3.0, 10.0, 0.25
"""Seconds that connecting and a transfer may take, and after which a wait looks up if nothing wakes it."""


def acting() -> "Rank":
    """The rank whose thread this is."""
    process = here().owner
    return cast("Rank", process.local)  # type: ignore[attr-defined]


class Simulated(Plugin):
    """Connects, restores and verifies simulated ranks."""

    @hookimpl
    def announce(self, groups: Sequence[Group]) -> Mapping[str, Json]:  # noqa: ARG002 - there is one group
        """Nothing that peers need, but it may fail."""
        acting().process.fails("announce")
        return {}

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """Shut all connections; whatever peers connect to after this rank's vote must not be hit."""
        rank = acting()
        rank.process.fails("quiesce")
        if interruption.incarnation > rank.connecting:
            rank.world.checks.quiesced(rank, interruption.incarnation)
            rank.world.network.shut(rank.rank, rank.process.incarnation)
            rank.process.idle()

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        """Meet all ranks of the incarnation."""
        rank = acting()
        rank.process.fails("reinit_comms")
        rank.connecting = rank.process.incarnation = request.incarnation
        meeting = rank.meet("connect", 0, incarnation=request.incarnation)
        end = rank.world.clock.now + CONNECT
        while (outcome := meeting.wait(rank.rank, SLICE)) is None and rank.world.clock.now < end:
            request.check()
        request.check()
        if not outcome:
            raise CommsError(f"rank {rank.rank} could not connect incarnation {request.incarnation}")
        return []

    @hookimpl
    def restore_state(self, recovery: Recovery) -> Receipt | None:
        """Donors send a part each, restoring ranks acknowledge."""
        rank = acting()
        rank.process.fails("restore_state")
        recovery.point("restore")
        roles = recovery.plan.roles
        restoring = [r for r, role in enumerate(roles) if role is Role.RESTORE]
        donors = recovery.plan.donors[REPLICA]
        if rank.rank in restoring:
            _receive(rank, recovery, donors)
        elif rank.rank in donors and restoring:
            rank.world.checks.donates(rank, recovery.plan)
            _send(rank, recovery, donors, restoring)
        return Receipt(phase="restore_state", plugin="simulated", rank=rank.rank, seconds=0.0, bytes=16, verified=True)

    @hookimpl
    def resume_data(self, recovery: Recovery) -> Receipt | None:  # noqa: ARG002 - there is nothing to resume
        """Leave it to core, but it may fail."""
        acting().process.fails("resume_data")
        return None

    @hookimpl
    def verify(self, recovery: Recovery) -> Receipt | None:
        """Compare the shared state of all ranks."""
        rank = acting()
        rank.process.fails("verify")
        recovery.point("verify")
        own = b"%d %d" % (recovery.plan.step, recovery.shards[0].digest())
        if len(set(recovery.gather(own))) > 1:
            raise InstepError(f"shared state differs after the recovery to step {recovery.plan.step}")
        return Receipt(phase="verify", plugin="simulated", rank=rank.rank, seconds=0.0, verified=True)


def _send(rank: "Rank", recovery: Recovery, donors: Sequence[int], restoring: Sequence[int]) -> None:
    network, inc = rank.world.network, recovery.plan.incarnation
    parts = {part: value for part, value in enumerate(rank.shared) if donors[part % len(donors)] == rank.rank}
    for other in restoring:
        network.post((inc, rank.rank, other), parts)
    for other in restoring:
        _fetched(rank, recovery, (inc, other, rank.rank), other)


def _receive(rank: "Rank", recovery: Recovery, donors: Sequence[int]) -> None:
    network, inc = rank.world.network, recovery.plan.incarnation
    arrived: dict[int, int] = {}
    for donor in donors:
        arrived.update(cast("dict[int, int]", _fetched(rank, recovery, (inc, donor, rank.rank), donor)))
    rank.tearing()
    wrong = int(rank.process.corrupt)
    rank.process.corrupt = False
    rank.shared = arrived[0], rank.shared[1]
    recovery.point("mid_transfer")
    rank.shared = arrived[0], arrived[1] ^ wrong
    for donor in donors:
        network.post((inc, rank.rank, donor), True)


def _fetched(rank: "Rank", recovery: Recovery, key: tuple[int, int, int], other: int) -> object:
    network, end = rank.world.network, rank.world.clock.now + TRANSFER
    while (found := network.fetch(key, SLICE, lambda: network.lost(key[0], other))) is None:
        recovery.check()
        if network.lost(key[0], other) or rank.world.clock.now > end:
            raise InstepError(f"rank {other} was lost in a transfer with rank {rank.rank}")
    return found


@lru_cache(maxsize=1)
def loaded() -> LoadedPlugins:
    """The plugins of every simulated rank."""
    return LoadedPlugins({"simulated": Simulated()})


@lru_cache(maxsize=1)
def none() -> LoadedPlugins:
    """No plugins, for an agent without any."""
    return LoadedPlugins()
