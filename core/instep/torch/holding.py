"""What a rank holds, as plugins that keep copies of it see it: shard groups, and the recorded private state."""

from collections.abc import Sequence

from instep.errors import InstepError
from instep.hooks import SharedState
from instep.model import Status
from instep.standing import Standing
from instep.torch.state import RankState


class RankHolding:
    """``hooks.Holding`` of one rank."""

    def __init__(self, state: RankState, standing: Standing) -> None:
        self._state, self._standing = state, standing

    @property
    def block(self) -> int:
        """See ``hooks.Holding``."""
        return self._standing.block

    @property
    def settled(self) -> bool:
        """See ``hooks.Holding``."""
        return not self._standing.unpublished and all(share.settled for share in self._state.shared.shares())

    def shards(self) -> Sequence[SharedState]:
        """See ``hooks.Holding``."""
        return self._state.shared.shares()

    def record(self, step: int) -> bytes:
        """See ``hooks.Holding``."""
        return self._state.private.capture(step)

    @property
    def loads(self) -> bool:
        """See ``hooks.Holding``."""
        return self._state.loader is not None

    def load(self, step: int | None) -> int:
        """See ``hooks.Holding``."""
        loader, standing = self._state.loader, self._standing
        if loader is None:
            raise InstepError("the script gave nothing that loads its checkpoints; see session.on_checkpoint")
        if standing.status is not Status.FRESH:
            standing.status = Status.TORN
        found: object = loader(step)
        if not isinstance(found, int) or found < 0 or step not in (None, found):
            asked = "its newest checkpoint" if step is None else f"the checkpoint of step {step}"
            raise InstepError(
                f"session.on_checkpoint: asked for {asked}, the script's function returned {found!r}, not the step that it loaded"
            )
        self._state.shared.restart()
        self._state.private.write(found)
        return found

    def take(self, step: int, record: bytes) -> None:
        """See ``hooks.Holding``. Buffers that the accepted state shares are not private, and no others are shared."""
        self._state.private.buffers.share_exactly(set(self._state.shared.adopted))
        self._state.private.take(step, record)
