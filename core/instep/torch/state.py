"""All state of a rank: what is protected, shared and private, and how it is checked, adopted, cleaned and digested."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash
from torch import nn

from instep import agreement
from instep.errors import UsageError
from instep.model import Json, Plan, ShardSize
from instep.torch import fsdp, reset
from instep.torch.adapter import Adapter
from instep.torch.forgotten import Forgotten
from instep.torch.gate import Gate
from instep.torch.ledger import Ledger
from instep.torch.private import Private
from instep.torch.shared import Shared
from instep.torch.tape import raw

if TYPE_CHECKING:
    from instep.torch.loaders import Cursor

CORE = "core"
"""Name of core's own notes in a vote."""


class RankState:
    """Shared and private state behind one object; ``ledger`` is there in a drill only."""

    def __init__(self, record: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.protected: dict[str, object] = {}
        self.private, self.shared = Private(record), Shared(rank=rank, world_size=world_size)
        self.adapters: dict[str, Adapter] = {}
        self.ledger: Ledger | None = None
        self.loader: Callable[[int | None], int] | None = None
        self._forgotten: Forgotten | None = None
        self._cursors: list[Cursor] = []
        self.shared.census.start()

    def add_cursor(self, name: str, cursor: "Cursor") -> None:
        """Keep the position of a loader or generator."""
        self.private.add_cursor(name, cursor)
        self._cursors.append(cursor)

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Keep the state of a framework's model and optimizer."""
        self.shared.add(name, adapter)
        for key, module in adapter.modules().items():
            self.private.add_module(f"{name}.{key}", module)
        for key, obj in adapter.private().items():
            self.private.add_object(f"{name}.{key}", obj)
        self.adapters[name] = adapter

    def watch(self, gate: Gate) -> None:
        """Look out for state that the script forgets to protect."""
        self._forgotten = Forgotten(gate, self.protected)

    def close(self) -> None:
        """Look out no longer."""
        if self._forgotten is not None:
            self._forgotten.close()

    def complete(self) -> None:
        """Everything is protected: check coverage, fix layouts. Does nothing the second time."""
        if self.private.frozen:
            return
        self.shared.check_coverage()
        for name, obj in self.protected.items():
            if isinstance(obj, nn.Module) and (switches := fsdp.Switches(obj)):
                self.private.add_object(f"{name}.fully_shard", switches)
        self.private.freeze()
        if self._forgotten is not None:
            self._forgotten.complete()

    def agree(self, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Prove that all ranks of a shard group start from equal state. Raises ``UsageError`` naming the first difference."""
        shares = {agreement.key(share.name): share for share in self.shared.shares()}
        rows = agreement.table(gather, {key: share.digest().to_bytes(8, "little") for key, share in shares.items()}, size=8)
        for key, share in shares.items():
            if tuple(sorted(rows[key])) != share.replicas:
                raise UsageError(
                    f"shard group {share.name!r} is on ranks {sorted(rows[key])}, rank {self.shared.rank} expects {list(share.replicas)}"
                )
        for key, ranks in agreement.differing(rows).items():
            agreement.explain(gather, ranks, shares[key].digests() if key in shares else None, self.shared.rank)

    def share_moved(self) -> None:
        """Buffers that a commit body changed are shared from now on."""
        for name, tensor in self.private.buffers.moved():
            self.shared.adopt_buffer(name, tensor)

    def agree_on_moved(self, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """After the first commit: buffers that its body changed must be equal on all ranks, or no rank could replace another one's."""
        moved = self.shared.adopted
        digest = xxhash.xxh3_64("".join(moved).encode())
        for tensor in moved.values():
            digest.update(raw(tensor))
        if len(set(gather(digest.digest()))) > 1:
            raise UsageError(
                f"the first commit changed buffers that differ between ranks ({', '.join(moved) or 'none on this rank'}): state that "
                "changes in a commit is shared. Average parameters alone ("
                "AveragedModel(nn.ParameterList(model.parameters()))), or use SyncBatchNorm"
            )

    def notes(self) -> dict[str, Json]:
        """What peers must know of this rank's state: buffers that turned out to be shared."""
        return {CORE: {"adopted": [*self.private.buffers.shared]}}

    def adopt(self, plan: Plan) -> None:
        """Share the buffers that any rank found to be shared; a replacement's layouts are fixed first."""
        self.complete()
        names: set[str] = set()
        for notes in plan.book.notes:
            core = notes.get(CORE)
            if isinstance(core, dict) and isinstance(adopted := core.get("adopted"), list):
                names.update(str(name) for name in adopted)
        for name, tensor in self.private.buffers.share(names):
            self.shared.adopt_buffer(name, tensor)

    def publish(self) -> None:
        """In a recovery, when shards are restored: hand out what is derived from them. Collective."""
        for adapter in self.adapters.values():
            adapter.publish()
        if self.adapters:
            for share in self.shared.shares():
                share.changed()

    def digest_ahead(self, check: Callable[[], None], enough: Callable[[], bool]) -> None:
        """Digest shared state while there is time: until ``enough``, or ``check`` raises."""

        def go_on() -> None:
            check()
            if enough():
                raise TimeoutError

        with suppress(TimeoutError):
            self.shared.digest_ahead(go_on)

    def sizes(self) -> dict[str, ShardSize]:
        """The shard groups of this rank, and the bytes of each."""
        return {share.name: ShardSize(replicas=share.replicas, bytes=share.size()) for share in self.shared.shares()}

    def stop_loaders(self) -> None:
        """Drop live iterators off the critical path."""
        for cursor in self._cursors:
            cursor.quiesce()

    def cut(self, modes: reset.Modes) -> None:
        """Clean what an interrupted step left dirty."""
        reset.clean(self.protected.values(), modes)
        for adapter in self.adapters.values():
            adapter.reset()
        if self.ledger is not None:
            self.ledger.drop()

    def dump(self) -> None:
        """Leave the digests of all state for a drill to compare."""
        if self.ledger is not None:
            self.ledger.state({**self.shared.digests(), **self.private.digests()})
