"""The state of a shard group as a frame and its tensors: quick to take at each commit, and turned into a schema only when it must be.

``Share.describe`` encodes everything, which takes longer than a commit may; a frame is a list of tokens that compare equal when nothing
but the bytes of tensors has changed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from instep import codec
from instep.errors import InstepError
from instep.torch.overlay import Schema

Token = tuple[object, ...]
Frame = list[Token]
_KEYS, _ITEMS, _TENSOR, _CODED = "keys", "items", "tensor", "coded"
_PLAIN = frozenset({type(None), bool, int, str, bytes})


class Taken(NamedTuple):
    """A tree taken apart: the frame, and the tensors, each once."""

    frame: Frame
    tensors: list[Tensor]


def take(tree: object) -> Taken:
    """Take a tree apart. Raises ``InstepError`` for a type that cannot be kept."""
    frame: Frame = []
    seen: dict[int, int] = {}
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        at = seen.setdefault(id(tensor), len(tensors))
        if at == len(tensors):
            tensors.append(tensor)
        return at

    def walk(value: object) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            frame.append((_TENSOR, number(value)))
        elif kind is dict:
            assert isinstance(value, dict)
            frame.append((_KEYS, *value))
            for part in value.values():
                walk(part)
        elif kind is list or kind is tuple:
            assert isinstance(value, list | tuple)
            frame.append((_ITEMS, kind, len(value)))
            for part in value:
                walk(part)
        elif kind in _PLAIN:
            frame.append((kind, value))
        elif kind is float:
            frame.append((kind, float.hex(value)))  # type: ignore[arg-type]
        else:
            state, inside = codec.split(value)
            frame.append((_CODED, state, tuple(number(tensor) for tensor in inside)))

    walk(tree)
    return Taken(frame, tensors)


def rebuild(frame: Frame, tensors: Sequence[Tensor]) -> object:
    """The tree of a frame, with these tensors in it."""
    tokens = iter(frame)
    return _next(tokens, tensors)


def schema(frame: Frame, tensors: Sequence[Tensor], reducers: Sequence[object]) -> tuple[bytes, tuple[int, ...]]:
    """What a donor would tell, and which of ``tensors`` it would send, in that order."""
    state, placed = codec.split(rebuild(frame, tensors))
    number = {id(tensor): at for at, tensor in enumerate(tensors)}
    order = tuple(dict.fromkeys(number[id(tensor)] for tensor in placed))
    sent = {at: position for position, at in enumerate(order)}
    places = tuple(sent[number[id(tensor)]] for tensor in placed)
    return Schema(state, places, tuple(reducers)).pack(), order


def _next(tokens: Iterator[Token], tensors: Sequence[Tensor]) -> object:
    kind, *rest = next(tokens)
    if kind == _TENSOR:
        return tensors[_int(rest[0])]
    if kind == _KEYS:
        return {key: _next(tokens, tensors) for key in rest}
    if kind == _ITEMS:
        items = [_next(tokens, tensors) for _ in range(_int(rest[1]))]
        return items if rest[0] is list else tuple(items)
    if kind == _CODED:
        state, inside = rest
        assert isinstance(state, bytes)
        assert isinstance(inside, tuple)
        return codec.decode(state, [tensors[at] for at in inside])
    return float.fromhex(str(rest[0])) if kind is float else rest[0]


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise InstepError(f"a copy's frame is damaged: {value!r} is no number")
    return value
