"""A shard group on this rank, ready to be sent and received: ``hooks.SharedState`` over whatever knows its tree.

A donor sends the tree without its tensors (the schema) and the tensors, each once; a receiver takes the donor's tree exactly, into its
own tensors where they fit.
"""

from collections.abc import Callable, Mapping, Sequence

import xxhash
from torch import Tensor

from instep import codec
from instep.errors import InstepError, UsageError
from instep.torch.adapter import ShardGroup
from instep.torch.ddp import Reducer
from instep.torch.digest import digest
from instep.torch.overlay import Incoming, branch, leaves, take_apart, unpack


class Share:
    """One shard group. ``reducers`` are those whose gradient buckets follow the donor's; the caller may add some later."""

    def __init__(self, group: ShardGroup, reducers: Sequence[Reducer] = ()) -> None:
        self._group, self._reducers = group, reducers
        self._incoming: Incoming | None = None
        self._ahead: int | None = None

    @property
    def name(self) -> str:
        """Key of this group in ``Plan.donors``."""
        return self._group.name

    @property
    def replicas(self) -> tuple[int, ...]:
        """Global ranks with equal copies."""
        return self._group.replicas

    @property
    def layouts(self) -> bool:
        """Whether the schema carries gradient bucket layouts."""
        return bool(self._reducers)

    @property
    def settled(self) -> bool:
        """Whether ``describe`` leaves this rank as it is: no reducer is about to agree on its layout."""
        return all(reducer.settled for reducer in self._reducers)

    def present(self) -> tuple[object, list[object]]:
        """The live tree, and the layouts of buckets that are known without getting ahead of DDP."""
        return self._group.tree(), [reducer.describe() if reducer.settled else None for reducer in self._reducers]

    def size(self) -> int:
        """Bytes of its tensors, each once."""
        return sum({id(tensor): tensor.nbytes for tensor in codec.split(self._group.tree())[1]}.values())

    def describe(self) -> tuple[bytes, Sequence[Tensor]]:
        """Donor: the schema, and the tensors in schema order."""
        schema, tensors = take_apart(self._group.tree(), [reducer.describe() for reducer in self._reducers])
        return schema.pack(), tensors

    def destination(self, schema: bytes, *, staged: bool) -> Sequence[Tensor]:
        """Receiver: tensors to receive into, in schema order; own ones where they fit, unless ``staged``.

        Raises:
            UsageError: the donor protects other objects, or objects of another structure; the first difference is named.
        """
        self._ahead, incoming = None, Incoming(unpack(schema))
        incoming.place(self._group.fit(incoming.theirs), staged=staged)
        self._incoming = incoming
        return incoming.landing

    def accept(self) -> None:
        """Receiver: take over what arrived in the tensors of the last ``destination``.

        Until this call nothing has changed on this rank but own tensors that were received into. An object whose
        ``load_state_dict`` fails leaves the rank torn.
        """
        incoming, self._incoming, self._ahead = self._incoming, None, None
        if incoming is None:
            raise InstepError("there is nothing to accept: destination() comes first")
        self._group.load(incoming.settle())

    def align(self, schema: bytes) -> None:
        """Every replica: bring reducers to the donor's gradient bucket layout.

        Raises:
            UsageError: the donor has other DistributedDataParallel modules.
        """
        described = unpack(schema).reducers
        if len(described) != len(self._reducers):
            raise UsageError(
                f"the donor has {len(described)} DistributedDataParallel modules, this rank {len(self._reducers)}; build them alike on "
                "all ranks before the first block"
            )
        for reducer, description in zip(self._reducers, described, strict=True):
            reducer.apply(description)

    def digest(self) -> int:
        """Order-sensitive 64-bit digest, once from ``digest_ahead`` if that was done."""
        ahead, self._ahead = self._ahead, None
        return self._digest(bool) if ahead is None else ahead

    def digest_ahead(self, go_on: Callable[[], object]) -> None:
        """Compute the next ``digest`` now, unless ``go_on`` raises. Nothing in the group may change until then but by this object."""
        self._ahead = None
        self._ahead = self._digest(go_on)

    def changed(self) -> None:
        """The state was changed from outside: what was computed ahead is void."""
        self._ahead = None

    def examine(self) -> None:
        """Raise ``UsageError`` when the state holds a type that cannot be kept."""
        for name, part in branch(self._group.tree(), "objects").items():
            codec.split(part, where=name)

    def _digest(self, go_on: Callable[[], object]) -> int:
        state, tensors = codec.split(self._group.tree())
        return int(xxhash.xxh3_64_intdigest(state + digest(tensors, go_on=go_on).to_bytes(8, "little")))

    def digests(self) -> dict[str, str]:
        """A digest (hex) of each tensor, and of each object's other values, by dotted name."""
        tree = self._group.tree()
        fixed = {**branch(tree, "tensors"), **branch(tree, "buffers")}
        out = {name: f"{digest([tensor]):016x}" for name, tensor in fixed.items() if isinstance(tensor, Tensor)}
        for name, part in branch(tree, "objects").items():
            out |= _digests(name, part)
        return out


def _digests(name: str, tree: object) -> dict[str, str]:
    parts = {f"{name}.{key}": part for key, part in tree.items()} if isinstance(tree, Mapping) else {name: tree}
    out: dict[str, str] = {}
    for path, part in parts.items():
        out[path] = xxhash.xxh3_64_hexdigest(codec.split(part)[0])
        out |= {leaf: f"{digest([tensor]):016x}" for leaf, tensor in leaves(part, path) if leaf != path}
        if isinstance(part, Tensor):
            out[path] = f"{digest([part]):016x}"
    return out
