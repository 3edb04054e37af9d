"""The typed tree codec: turns any ``state_dict`` into bytes and back with every type kept, or names what it cannot keep.

Each value is a tag byte and a payload. Equal trees give equal bytes on every rank (sets are ordered by their encoding, a tensor's
device is named by its type alone), so an encoding can be digested and compared. Nothing is pickled, and torch is imported only
when a tree holds something of torch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from instep.codec.reader import Reader, TensorSpec
from instep.codec.writer import DEPTH, write
from instep.errors import InstepError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEPTH", "TensorSpec", "decode", "encode", "outline", "specs", "split"]


def encode(tree: object, *, where: str = "") -> bytes:
    """The bytes of a tree, tensors included.

    Args:
        tree: what ``state_dict()`` returned, or any value made of the types that the codec knows.
        where: the name that paths in errors begin with.

    Raises:
        UsageError: a value has a type that cannot be kept; the message gives its path.
    """
    return write(tree, where, None)


def split(tree: object, *, where: str = "") -> "tuple[bytes, list[Tensor]]":
    """The bytes of a tree without its tensors, and the tensors themselves in the order in which they stand in it.

    Raises:
        UsageError: a value has a type that cannot be kept; the message gives its path.
    """
    tensors: list[Tensor] = []
    return write(tree, where, tensors), tensors


def decode(data: bytes, tensors: "Sequence[Tensor] | None" = None) -> object:
    """The tree that ``encode`` or ``split`` was given; ``tensors`` take the places of those that ``split`` took out.

    Raises:
        InstepError: the bytes are damaged, or ``tensors`` are not as many, or not of the types and shapes, that they ask for.
    """
    reader = Reader(data, tensors or ())
    tree = reader.tree()
    if tensors is not None and len(tensors) != len(reader.specs):
        raise InstepError(f"a tree with {len(reader.specs)} tensors taken out was given {len(tensors)}")
    return tree


def outline(data: bytes, blank: "Callable[[TensorSpec], Tensor]") -> object:
    """The tree that ``split`` was given, with what ``blank`` makes of each spec in place of the tensors that it took out.

    Raises:
        InstepError: the bytes are damaged.
    """
    return Reader(data, None, blank=blank).tree()


def specs(data: bytes) -> list[TensorSpec]:
    """What the tensors that ``split`` took out look like, in order.

    Raises:
        InstepError: the bytes are damaged.
    """
    reader = Reader(data, None)
    reader.tree()
    return reader.specs
