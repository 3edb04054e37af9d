"""The schema of shared state, and how a receiver lays a donor's tree over its own to find where each tensor goes."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep import codec
from instep.errors import InstepError, UsageError
from instep.torch.digest import plain

FIXED = ("tensors", "buffers")
"""Branches of the tree whose tensors exist on every rank; all other tensors may come and go."""


@dataclass(frozen=True)
class Schema:
    """What a donor tells before it sends tensors.

    ``state`` is the tree without its tensors. ``places`` names for each tensor of the tree the one sent that belongs there: a tensor
    that stands in several places is sent once. ``reducers`` are the gradient bucket layouts.
    """

    state: bytes
    places: tuple[int, ...]
    reducers: tuple[object, ...]

    def pack(self) -> bytes:
        """The bytes to send."""
        return codec.encode((self.state, list(self.places), list(self.reducers)))


def unpack(data: bytes) -> Schema:
    """The schema that ``pack`` wrote. Raises ``InstepError`` when the bytes are damaged."""
    match codec.decode(data):
        case (bytes(state), list(places), list(reducers)):
            return Schema(state, tuple(places), tuple(reducers))
    raise InstepError("the donor's schema is damaged")


def names(data: bytes) -> list[str]:
    """A name for each tensor that a packed schema announces, in order: where it stands in the tree, without the branch.

    Raises ``InstepError`` when the bytes are damaged.
    """
    schema = unpack(data)
    blanks: list[Tensor] = []

    def blank(_: codec.TensorSpec) -> Tensor:
        blanks.append(torch.empty(()))
        return blanks[-1]

    tree = _tree(codec.outline(schema.state, blank))
    found = {id(leaf): path for part in ("objects", *FIXED) for path, leaf in _named(branch(tree, part))}
    out = dict.fromkeys(schema.places, "")
    for place, one in zip(schema.places, blanks, strict=True):
        out[place] = found.get(id(one), out[place])
    used: set[str] = set()
    for place in sorted(out):
        while not out[place] or out[place] in used:
            out[place] += f"#{place}"
        used.add(out[place])
    return [out[place] for place in sorted(out)]


def take_apart(tree: object, reducers: Sequence[object]) -> tuple[Schema, list[Tensor]]:
    """The schema of a tree, and its tensors, each once and contiguous."""
    state, tensors = codec.split(tree)
    unique = {id(tensor): tensor for tensor in tensors}
    numbers = {key: number for number, key in enumerate(unique)}
    places = tuple(numbers[id(tensor)] for tensor in tensors)
    return Schema(state, places, tuple(reducers)), [plain(tensor) for tensor in unique.values()]


def branch(tree: object, name: str) -> dict[str, object]:
    """One branch of the tree of all shared state."""
    if isinstance(tree, dict) and isinstance(part := tree.get(name), dict):
        return part
    raise InstepError(f"the donor's schema has no {name!r}")


def compare(theirs: object, own: object) -> None:
    """Raise ``UsageError`` naming the first difference between two trees that a transfer could not bridge."""
    for name in ("kinds", *FIXED):
        a, b = branch(theirs, name), branch(own, name)
        for key in [*a, *b]:
            if key not in a or key not in b:
                here, there = ("the donor", "this rank") if key in a else ("this rank", "the donor")
                raise UsageError(f"{key}: protected on {here}, but not on {there}; all ranks must build and protect the same objects")
            x, y = _look(a[key]), _look(b[key])
            if x != y:
                raise UsageError(f"{key}: {x} on the donor, {y} on this rank; all ranks must build the same objects")
        for x, y in zip(a, b, strict=True):
            if x != y:
                raise UsageError(f"{x} on the donor, {y} on this rank in its place; all ranks must build and protect in the same order")


class Incoming:
    """A donor's state on its way in: ``theirs`` is its tree, with blanks where tensors belong.

    ``landing`` is where each tensor sent is to be received.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._specs: list[codec.TensorSpec] = []
        self._blanks: list[Tensor] = []
        self._own: list[Tensor | None] = []
        self.landing: list[Tensor] = []
        self.theirs = _tree(codec.outline(schema.state, self._blank))

    def place(self, own: object, *, staged: bool) -> None:
        """Choose the landing places: tensors of ``own``, this rank's tree, where they fit, unless ``staged``.

        Raises:
            UsageError: the trees differ where they must not; the first difference is named.
        """
        compare(self.theirs, own)
        found: dict[int, Tensor] = {}
        _pair(self.theirs, own, found)
        used: set[int] = set()
        for place, spec, blank in zip(self._schema.places, self._specs, self._blanks, strict=True):
            if place < len(self.landing):
                continue
            mine = found.get(id(blank))
            if mine is not None and (mine.device.type != spec.device or id(mine) in used):
                mine = None
            used.add(id(mine))
            self._own.append(mine)
            if mine is None or staged or plain(mine).data_ptr() != mine.data_ptr():
                device = spec.device if mine is None else mine.device
                self.landing.append(torch.empty(blank.shape, dtype=blank.dtype, device=device))
            else:
                self.landing.append(mine.detach())
        self._check_fixed()

    def settle(self) -> dict[str, object]:
        """Copy what landed elsewhere to the own tensors. Returns the donor's tree with this rank's tensors."""
        final = [landing if own is None else own for own, landing in zip(self._own, self.landing, strict=True)]
        tree = _tree(codec.decode(self._schema.state, [final[place] for place in self._schema.places]))
        with torch.no_grad():
            for own, landing in zip(self._own, self.landing, strict=True):
                if own is not None and own.data_ptr() != landing.data_ptr():
                    own.copy_(landing)
        return tree

    def _blank(self, spec: codec.TensorSpec) -> Tensor:
        """An expanded scalar: the type and shape of a tensor, and no memory; the meta device takes several times as long."""
        self._specs.append(spec)
        self._blanks.append(torch.empty((), dtype=getattr(torch, spec.dtype)).expand(spec.shape))
        return self._blanks[-1]

    def _check_fixed(self) -> None:
        place = {id(blank): place for blank, place in zip(self._blanks, self._schema.places, strict=True)}
        for name in FIXED:
            for key, blank in branch(self.theirs, name).items():
                if self._own[place[id(blank)]] is None:
                    raise UsageError(f"{key}: on another kind of device, or tied otherwise, than on the donor; build all ranks alike")


def leaves(tree: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree, with dotted paths."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(tree, list | tuple | deque):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}.{index}")


def _named(part: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for key, value in part.items():
        yield from leaves(value, key)


def _pair(theirs: object, own: object, found: dict[int, Tensor]) -> None:
    if isinstance(theirs, Tensor):
        if isinstance(own, Tensor) and own.dtype == theirs.dtype and own.shape == theirs.shape:
            found[id(theirs)] = own
    elif isinstance(theirs, Mapping) and isinstance(own, Mapping):
        for key in theirs.keys() & own.keys():
            _pair(theirs[key], own[key], found)
    elif isinstance(theirs, list | tuple | deque) and isinstance(own, list | tuple | deque):
        for a, b in zip(theirs, own, strict=False):
            _pair(a, b, found)


def _tree(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise InstepError("the donor's schema is damaged: it is no tree of named state")


def _look(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
