"""Writes a tree: one function for each type, found by exact type, so that a subclass is never mistaken for its base."""

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

DEPTH = 64
"""Deepest nesting of containers."""
MAGIC = b"IT1\n"
COUNT = struct.Struct("<I")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
_PACKED = 8
"""Sequences of plain int64 or floats of this length and more are packed: Python's generator state is a tuple of 625 ints."""
_ADVICE = (
    "keep to None, bool, int, float, complex, str, bytes, list, tuple, dict, set, Counter, deque, numpy arrays and dense torch tensors, "
    "or convert it in state_dict() and back in load_state_dict()"
)


class Refused(Exception):  # noqa: N818 - never leaves the codec
    """A value that cannot be kept; gathers its path while the recursion unwinds."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []


def write(tree: object, where: str, tensors: "list[torch.Tensor] | None") -> bytes:
    """The bytes of ``tree``; its tensors are moved to ``tensors`` if that is a list, and inline if it is ``None``."""
    writer = Writer(tensors)
    writer.out += MAGIC
    try:
        writer.put(tree)
    except Refused as refused:
        path = where + "".join(reversed(refused.path)) or "the value"
        raise UsageError(f"{path}: {refused}; {_ADVICE}") from None
    return bytes(writer.out)


class Writer:
    """Appends values to ``out``. ``hashable`` is set below dict keys and set elements, where tensors have no meaning."""

    def __init__(self, tensors: "list[torch.Tensor] | None", *, depth: int = 0, hashable: bool = False) -> None:
        self.out = bytearray()
        self.tensors = tensors
        self.depth = depth
        self.hashable = hashable

    def put(self, value: object) -> None:
        """Append one value, whatever its type."""
        kind = type(value)
        writer = _WRITERS.get(kind) or _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}") or _numpy_scalar(kind)
        if writer is None:
            raise Refused(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept")
        writer(self, value)

    def count(self, tag: bytes, number: int) -> None:
        """Append a tag and a number of entries."""
        if number > 0xFFFFFFFF:
            raise Refused(f"{number} entries are more than 32 bits can count")
        self.out += tag + COUNT.pack(number)

    def blob(self, tag: bytes, data: "bytes | memoryview") -> None:
        """Append a tag, a length and raw bytes."""
        self.out += tag + INT.pack(len(data))
        self.out += data

    def items(self, values: Iterable[object], name: Callable[[int], str] = "[{}]".format) -> None:
        """Append values one level deeper; ``name`` gives the path of the one at an index."""
        self.depth += 1
        if self.depth > DEPTH:
            raise Refused(f"nested more than {DEPTH} levels deep, or contains itself")
        for index, value in enumerate(values):
            try:
                self.put(value)
            except Refused as refused:
                refused.path.append(name(index))
                raise
        self.depth -= 1

    def spec(self, tag: bytes, dtype: str, shape: Sequence[int]) -> None:
        """Append a tag, the name of an element type, and a shape."""
        self.out += tag
        self.put(dtype)
        self.count(b"", len(shape))
        self.out += struct.pack(f"<{len(shape)}q", *shape)


def _int(w: Writer, v: int) -> None:
    if -(2**63) <= v < 2**63:
        w.out += b"i" + INT.pack(v)
    else:
        w.blob(b"j", v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True))


def _str(w: Writer, v: str) -> None:
    w.blob(b"s", v.encode("utf-8", "surrogatepass"))


def _sequence(tag: bytes) -> Callable[[Writer, Sequence[object]], None]:
    def put(w: Writer, v: Sequence[object]) -> None:
        w.count(tag, len(v))
        kinds = set(map(type, v)) if len(v) >= _PACKED else set()
        for kind, code in ((int, "q"), (float, "d")):
            if kinds == {kind}:
                try:
                    packed = struct.pack(f"<{len(v)}{code}", *v)
                except struct.error:
                    break
                w.out += code.encode() + packed
                return
        w.out += b"-"
        w.items(v)

    return put


def _mapping(tag: bytes) -> Callable[[Writer, Mapping[object, object]], None]:
    def put(w: Writer, v: Mapping[object, object]) -> None:
        w.count(tag, len(v))
        before, w.hashable = w.hashable, True
        w.items(v.keys(), ".keys()[{}]".format)
        w.hashable = before
        w.items(v.values(), lambda index: f"[{list(v)[index]!r}]")

    return put


def _set(tag: bytes) -> Callable[[Writer, AbstractSet[object]], None]:
    def put(w: Writer, v: AbstractSet[object]) -> None:
        parts = []
        for element in v:
            part = Writer(None, depth=w.depth, hashable=True)
            part.items((element,), lambda _: ".element")
            parts.append(bytes(part.out))
        w.count(tag, len(v))
        w.out += b"".join(sorted(parts))

    return put


def _deque(w: Writer, v: "deque[object]") -> None:
    w.out += b"q"
    w.put(v.maxlen)
    w.put(list(v))


def _array(w: Writer, v: "np.ndarray[Any, np.dtype[Any]]") -> None:
    import numpy as np

    if v.dtype.hasobject or np.dtype(v.dtype.str) != v.dtype:
        raise Refused(f"a numpy array of {v.dtype} cannot be kept")
    w.spec(b"a", v.dtype.str, v.shape)
    w.blob(b"", v.tobytes())


def _numpy_scalar(kind: type) -> "Callable[[Writer, Any], None] | None":
    if kind.__module__ != "numpy":
        return None
    import numpy as np

    def put(w: Writer, v: "np.generic") -> None:
        if v.dtype.hasobject or np.dtype(v.dtype.str) != v.dtype:
            raise Refused(f"a numpy scalar of {v.dtype} cannot be kept")
        w.spec(b"g", v.dtype.str, ())
        w.blob(b"", v.tobytes())

    return put if issubclass(kind, np.generic) else None


def _tensor(w: Writer, v: "torch.Tensor") -> None:
    import torch

    if w.hashable:
        raise Refused("a tensor as a key or in a set has no meaning in another process")
    if v.layout is not torch.strided or v.is_quantized or v.device.type == "meta":
        raise Refused(f"a tensor that is {v.layout}, {v.dtype} on {v.device} cannot be kept")
    inline = w.tensors is None
    w.spec(b"x" if inline else b"X", str(v.dtype).removeprefix("torch."), v.shape)
    w.put(v.device.type)
    if w.tensors is None:
        flat = v.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        w.blob(b"", flat.view(torch.uint8).numpy().tobytes())
    else:
        w.tensors.append(v)


def _named(tag: bytes) -> Callable[[Writer, object], None]:
    def put(w: Writer, v: object) -> None:
        w.blob(tag, str(v).removeprefix("torch.").encode())

    return put


_WRITERS: dict[type, Callable[[Writer, Any], None]] = {
    type(None): lambda w, _: w.out.extend(b"N"),
    bool: lambda w, v: w.out.extend(b"T" if v else b"F"),
    int: _int,
    float: lambda w, v: w.out.extend(b"d" + FLOAT.pack(v)),
    complex: lambda w, v: w.out.extend(b"c" + COMPLEX.pack(v.real, v.imag)),
    str: _str,
    bytes: lambda w, v: w.blob(b"b", v),
    bytearray: lambda w, v: w.blob(b"B", v),
    list: _sequence(b"l"),
    tuple: _sequence(b"t"),
    set: _set(b"e"),
    frozenset: _set(b"z"),
    dict: _mapping(b"D"),
    defaultdict: _mapping(b"D"),
    OrderedDict: _mapping(b"O"),
    Counter: _mapping(b"C"),
    deque: _deque,
}
_FOREIGN: dict[str, Callable[[Writer, Any], None]] = {
    "numpy.ndarray": _array,
    "torch.Tensor": _tensor,
    "torch.nn.parameter.Parameter": _tensor,
    "torch.Size": _sequence(b"S"),
    "torch.dtype": _named(b"y"),
    "torch.device": _named(b"v"),
}
