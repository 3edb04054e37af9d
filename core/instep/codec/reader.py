"""Reads a tree back, and trusts nothing: every length is checked against the bytes that are there."""

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from instep.codec.writer import COMPLEX, COUNT, DEPTH, FLOAT, INT, MAGIC
from instep.errors import InstepError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor that was taken out of a tree looks like: ``dtype`` as in "float32", ``device`` as in "cpu" or "cuda"."""

    dtype: str
    shape: tuple[int, ...]
    device: str


class Reader:
    """One pass over the bytes of a tree; ``specs`` grows by each tensor that stands outside of it.

    ``tensors`` takes those places; with ``None`` they are left empty, for a caller that wants the specs alone, or get what ``blank``
    makes of their specs.
    """

    def __init__(
        self, data: bytes, tensors: "Sequence[torch.Tensor] | None", *, blank: "Callable[[TensorSpec], torch.Tensor] | None" = None
    ) -> None:
        self.specs: list[TensorSpec] = []
        self._data = memoryview(data)
        self._at = 0
        self._depth = 0
        self._tensors, self._blank = tensors, blank

    def tree(self) -> object:
        """The whole tree. Raises ``InstepError`` when the bytes are not one."""
        if self.take(len(MAGIC)) != MAGIC:
            raise InstepError("these bytes were not written by this version of the codec")
        try:
            value = self.value()
        except (TypeError, ValueError, OverflowError, RuntimeError, struct.error) as error:
            raise InstepError(f"damaged tree at byte {self._at}: {error}") from error
        if self._at != len(self._data):
            raise InstepError(f"damaged tree: {len(self._data) - self._at} bytes left over after its end")
        return value

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        part = self._data[self._at : self._at + size]
        if size < 0 or len(part) != size:
            raise InstepError(f"damaged tree: {size} bytes announced at byte {self._at}, {len(self._data) - self._at} are there")
        self._at += size
        return part

    def value(self) -> object:
        """The next value, whatever its type."""
        tag = bytes(self.take(1))
        read = _READERS.get(tag)
        if read is None:
            raise InstepError(f"damaged tree: unknown tag {tag!r} at byte {self._at - 1}")
        self._depth += 1
        if self._depth > 2 * DEPTH + 2:
            raise InstepError(f"damaged tree: nested more than {DEPTH} levels deep")
        value = read(self)
        self._depth -= 1
        return value

    def count(self) -> int:
        """A number of entries, each of which has one byte at least."""
        number = int(COUNT.unpack(self.take(COUNT.size))[0])
        if number > len(self._data) - self._at:
            raise InstepError(f"damaged tree: {number} entries announced at byte {self._at}")
        return number

    def blob(self) -> memoryview:
        """Raw bytes after their length."""
        return self.take(int(INT.unpack(self.take(INT.size))[0]))

    def text(self) -> str:
        """A string; any other value here is damage."""
        value = self.value()
        if not isinstance(value, str):
            raise InstepError(f"damaged tree: {type(value).__name__} where a name was due at byte {self._at}")
        return value

    def spec(self) -> tuple[str, tuple[int, ...]]:
        """The name of an element type, and a shape."""
        dtype = self.text()
        ndim = self.count()
        return dtype, struct.unpack(f"<{ndim}q", self.take(8 * ndim))

    def outside(self) -> object:
        """The tensor that stands at the next place outside of the tree."""
        dtype, shape = self.spec()
        spec = TensorSpec(dtype, shape, self.text())
        index = len(self.specs)
        self.specs.append(spec)
        if self._tensors is None:
            return None if self._blank is None else self._blank(spec)
        if index >= len(self._tensors):
            raise InstepError(f"tensor {index} ({spec}) of a tree is missing")
        tensor = self._tensors[index]
        if str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != shape:
            raise InstepError(f"tensor {index} of a tree is {tensor.dtype} {tuple(tensor.shape)}, expected {spec}")
        return tensor


def _sequence(r: Reader) -> list[object]:
    number = r.count()
    code = bytes(r.take(1))
    if code in (b"q", b"d"):
        return list(struct.unpack(f"<{number}{code.decode()}", r.take(8 * number)))
    if code != b"-":
        raise InstepError(f"damaged tree: unknown packing {code!r}")
    return [r.value() for _ in range(number)]


def _values(r: Reader) -> list[object]:
    return [r.value() for _ in range(r.count())]


def _pairs(r: Reader) -> list[tuple[object, object]]:
    keys = _values(r)
    return [(key, r.value()) for key in keys]


def _counter(r: Reader) -> "Counter[object]":
    counter: Counter[object] = Counter()
    for key, value in _pairs(r):
        dict.__setitem__(cast("dict[object, object]", counter), key, value)
    return counter


def _deque(r: Reader) -> "deque[object]":
    maxlen, values = r.value(), r.value()
    if not isinstance(values, list) or not (maxlen is None or isinstance(maxlen, int)):
        raise InstepError("damaged tree: a deque without a list of values")
    return deque(values, maxlen)


def _array(r: Reader) -> object:
    import numpy as np

    dtype, shape = r.spec()
    data = bytearray(r.blob())
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.ndarray(shape, np.dtype(dtype), buffer=data)
    if array.nbytes != len(data):
        raise InstepError(f"damaged tree: {len(data)} bytes for an array of {dtype} {shape}")
    return array


def _scalar(r: Reader) -> object:
    import numpy as np

    dtype, _ = r.spec()
    array: np.ndarray[tuple[()], np.dtype[np.generic]] = np.ndarray((), np.dtype(dtype), buffer=bytes(r.blob()))
    return array[()]


def _tensor(r: Reader) -> object:
    import torch

    dtype, shape = r.spec()
    device, data = r.text(), r.blob()
    if not len(data) and 0 in shape:
        return torch.empty(shape, dtype=_dtype(dtype), device=device)
    return torch.frombuffer(bytearray(data), dtype=_dtype(dtype)).reshape(shape).to(device)


def _dtype(name: str) -> "torch.dtype":
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InstepError(f"this torch has no dtype {name!r}")
    return dtype


def _device(r: Reader) -> object:
    import torch

    return torch.device(str(r.blob(), "ascii"))


def _size(r: Reader) -> object:
    import torch

    return torch.Size(int(str(n)) for n in _sequence(r))


_READERS: dict[bytes, Callable[[Reader], object]] = {
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"F": lambda _: False,
    b"i": lambda r: INT.unpack(r.take(INT.size))[0],
    b"j": lambda r: int.from_bytes(r.blob(), "little", signed=True),
    b"d": lambda r: FLOAT.unpack(r.take(FLOAT.size))[0],
    b"c": lambda r: complex(*COMPLEX.unpack(r.take(COMPLEX.size))),
    b"s": lambda r: str(r.blob(), "utf-8", "surrogatepass"),
    b"b": lambda r: bytes(r.blob()),
    b"B": lambda r: bytearray(r.blob()),
    b"l": _sequence,
    b"t": lambda r: tuple(_sequence(r)),
    b"e": lambda r: set(_values(r)),
    b"z": lambda r: frozenset(_values(r)),
    b"D": lambda r: dict(_pairs(r)),
    b"O": lambda r: OrderedDict(_pairs(r)),
    b"C": _counter,
    b"q": _deque,
    b"a": _array,
    b"g": _scalar,
    b"x": _tensor,
    b"X": lambda r: r.outside(),
    b"S": _size,
    b"y": lambda r: _dtype(str(r.blob(), "ascii")),
    b"v": _device,
}
