"""Copies of shard groups in host memory, two steps of each: taken at a commit, or received from the rank that took them.

A copy consists of parts: all small tensors behind each other, and each large tensor by itself. Every part has a digest. A part whose
digest is that of the copy before is shared with it: what never changes, as frozen parameters, is stored and sent once.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from instep import codec
from instep.errors import InstepError
from instep.torch.digest import plain
from instep_state_replica.copies_tree import Frame, schema, take

_SMALL = 128 * 1024
"""Bytes up to which tensors share a part; torch copies those in one thread, so that no pool of threads disturbs the step."""
_ALIGN = 64
Spec = tuple[str, tuple[int, ...]]
"""Type ("float32") and shape of a tensor."""


class Arrangement:
    """Where the tensors of a copy lie: part and first byte of each; ``sizes`` of the parts in bytes."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self.sizes = [0]
        self.places: list[tuple[int, int]] = []
        for dtype, shape in self.specs:
            size = int(np.prod(shape, dtype=np.int64)) * _dtype(dtype).itemsize
            if size <= _SMALL:
                self.places.append((0, self.sizes[0]))
                self.sizes[0] += -(-size // _ALIGN) * _ALIGN
            else:
                self.places.append((len(self.sizes), 0))
                self.sizes.append(size)
        self.packed = codec.encode(self.specs)
        self.small = [at for at, (part, _) in enumerate(self.places) if part == 0]
        self.large = [at for at, (part, _) in enumerate(self.places) if part]

    @staticmethod
    def unpack(data: bytes) -> "Arrangement":
        """The arrangement that was ``packed``. Raises ``InstepError`` when it is damaged."""
        match codec.decode(data):
            case tuple(specs):
                return Arrangement([(str(dtype), tuple(shape)) for dtype, shape in specs])
        raise InstepError("the types and shapes of a copy are damaged")


class Part:
    """Some bytes of host memory, and the tensors in them."""

    def __init__(self, size: int) -> None:
        self.data = torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.bytes = self.data.numpy()
        self._views: list[Tensor] = []
        self._of: Arrangement | None = None

    def views(self, arrangement: Arrangement) -> list[Tensor]:
        """The small tensors of an arrangement whose first part this is."""
        if self._of is not arrangement:
            self._of, self._views = arrangement, [view(self, *arrangement.specs[i], arrangement.places[i][1]) for i in arrangement.small]
        return self._views

    def digest(self) -> int:
        """Digest of all bytes."""
        return int(xxhash.xxh3_64_intdigest(self.bytes.data))


@dataclass
class Copy:
    """A complete copy of one shard group at one step. ``reducers``: bucket layouts, ``None`` for one that live replicas must tell."""

    name: str
    step: int
    replicas: tuple[int, ...]
    layouts: bool
    arrangement: Arrangement
    parts: list[Part]
    digests: list[int]
    frame: Frame = field(default_factory=list)
    reducers: list[object] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    told: tuple[bytes, tuple[int, ...]] | None = None
    tree: object = None

    def tensors(self) -> list[Tensor]:
        """All tensors, as views of the parts."""
        specs, places = self.arrangement.specs, self.arrangement.places
        return [view(self.parts[part], *spec, at) for spec, (part, at) in zip(specs, places, strict=True)]

    def schema(self) -> tuple[bytes, tuple[int, ...]]:
        """What a donor of this copy tells, and the order in which it sends the tensors; made when it is first asked for."""
        if self.told is None:
            self.told = schema(self.frame, self.tensors(), self.reducers)
        return self.told

    def describe(self) -> tuple[bytes, list[Tensor]]:
        """Schema and tensors, as ``SharedState.describe``. Raises ``InstepError`` when the memory of the copy has changed."""
        if [part.digest() for part in self.parts] != self.digests:
            raise InstepError(f"the copy of shard group {self.name!r} of step {self.step} has changed in memory (digests differ)")
        told, order = self.schema()
        tensors = self.tensors()
        return told, [tensors[at] for at in order]


def view(part: Part, dtype: str, shape: tuple[int, ...], at: int) -> Tensor:
    """A tensor in the bytes of a part, from byte ``at`` on."""
    kind = _dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return part.data[at : at + size].view(kind).view(shape)


class Shelf:
    """Copies by shard group and step, the last two steps of each group."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Copy]] = {}

    def begin(self, name: str, step: int) -> tuple[Copy | None, list[Part]]:
        """A copy of ``step`` is about to be made: the newest one before or of it, and parts whose memory can be used again.

        Copies of later steps are of a future that was given up.
        """
        row = self._rows.setdefault(name, {})
        kept = {at: copy for at, copy in row.items() if step - 1 <= at <= step}
        newest = max(kept, default=max(row, default=None))
        before = None if newest is None else row[newest]
        used = {id(part) for copy in (*kept.values(), before) if copy is not None for part in copy.parts}
        spare = [part for at, copy in row.items() if at not in kept for part in copy.parts if id(part) not in used]
        self._rows[name] = kept
        return before, spare

    def put(self, copy: Copy) -> None:
        """A copy is complete."""
        self._rows.setdefault(copy.name, {})[copy.step] = copy

    def get(self, name: str, step: int) -> Copy | None:
        """The copy of a step, if it is here."""
        return self._rows.get(name, {}).get(step)

    def drop(self, name: str, step: int) -> None:
        """A copy turned out to be damaged."""
        self._rows.get(name, {}).pop(step, None)

    def steps(self) -> Mapping[str, tuple[int, ...]]:
        """Steps with a complete copy, by shard group."""
        return {name: tuple(sorted(row)) for name, row in self._rows.items() if row}

    def bytes(self) -> int:
        """Host memory in use."""
        parts = {id(part): len(part.bytes) for row in self._rows.values() for copy in row.values() for part in copy.parts}
        return sum(parts.values())


class Spares:
    """Parts to be used again, by size."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._by: dict[int, list[Part]] = {}
        for part in {id(part): part for part in parts}.values():
            self._by.setdefault(len(part.bytes), []).append(part)

    def part(self, size: int) -> Part:
        """A part of this size, a new one if there is none."""
        return found.pop() if (found := self._by.get(size)) else Part(size)


@dataclass(frozen=True)
class Look:
    """A shard group as main saw it at a commit: its live tree, which does not change until the next one."""

    name: str
    replicas: tuple[int, ...]
    layouts: bool
    tree: object
    reducers: list[object]


def capture(look: Look, step: int, before: Copy | None, spares: Spares, go_on: Callable[[], object]) -> Copy:
    """Copy a shard group; ``before`` is the last copy. ``go_on`` may raise, to stop it. Runs in any thread."""
    frame, tensors = (before.frame, before.sources) if before is not None and before.tree is look.tree else take(look.tree)
    same = before is not None and before.frame == frame and before.reducers == look.reducers
    arrangement = _arranged(tensors, before)
    known = before is not None and before.arrangement is arrangement
    first = spares.part(arrangement.sizes[0])
    with torch.no_grad():
        if small := [tensors[at] for at in arrangement.small]:
            torch._foreach_copy_(first.views(arrangement), small)
    parts, digests = [first], [first.digest()]
    for at in arrangement.large:
        go_on()
        part, digest = _large(tensors[at], arrangement.places[at][0], before if known else None, spares)
        parts.append(part)
        digests.append(digest)
    if before is not None and known and before.digests[0] == digests[0]:
        parts[0] = before.parts[0]
    copy = Copy(look.name, step, look.replicas, look.layouts, arrangement, parts, digests, frame, look.reducers, tensors, tree=look.tree)
    if before is not None and same and known:
        copy.told = before.told
    return copy


def _arranged(tensors: Sequence[Tensor], before: Copy | None) -> Arrangement:
    if before is not None and len(before.sources) == len(tensors) and all(map(operator.is_, before.sources, tensors)):
        return before.arrangement
    specs = tuple(spec(tensor) for tensor in tensors)
    return before.arrangement if before is not None and before.arrangement.specs == specs else Arrangement(specs)


def spec(tensor: Tensor) -> Spec:
    """Type and shape."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _large(tensor: Tensor, number: int, before: Copy | None, spares: Spares) -> tuple[Part, int]:
    source = plain(tensor).reshape(-1).view(torch.uint8)
    if source.device.type != "cpu":
        part = spares.part(source.numel())
        part.data.copy_(source)
        digest = part.digest()
    else:
        digest = int(xxhash.xxh3_64_intdigest(source.numpy().data))
    if before is not None and before.digests[number] == digest:
        return before.parts[number], digest
    if source.device.type == "cpu":
        part = spares.part(source.numel())
        np.copyto(part.bytes, source.numpy())  # lets other threads run, and starts none
    return part, digest


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InstepError(f"a copy names the type {name!r}, which this torch does not know")
    return found
