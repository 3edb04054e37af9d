"""One record of the cache: a safetensors file of a batch, with its place in the stream and a checksum over all of it.

The data section holds the batch's tensors, the structure around them (core's tree codec), the source's state behind the batch if it has
one, and padding up to the size of the recycled file. Nothing is pickled; whoever reads trusts nothing before the checksum was right.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import xxhash

from instep import codec
from instep.errors import InstepError
from instep_mmap_loader.errors import Refused
from instep_mmap_loader.order import At

FORMAT = "instep batch 1"
Kind = Literal["batch", "end", "error", "bypass"]
_LENGTH = struct.Struct("<Q")
_ALIGN = 64
_CHUNK = 1 << 18
_BLANK = "0" * 16
_MOST_HEADER = 1 << 24
_FORGED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Label:
    """What a record is: ``batch``, the ``end`` of an epoch, an ``error`` of the dataset, or a batch that must ``bypass`` the cache."""

    kind: Kind
    at: At
    next: At
    fingerprint: str
    generation: int


@dataclass(frozen=True)
class Content:
    """A record as it is read: the batch (for other kinds a message), and the source's state behind it, as the codec encodes it."""

    label: Label
    tree: object
    state: bytes | None = None
    size: int = 0


@dataclass
class Draft:
    """A record about to be written: its parts in order, and the bytes that they need in the file."""

    label: Label
    names: list[tuple[str, str, list[int]]] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)

    @property
    def needs(self) -> int:
        """The smallest file that holds it."""
        return self.used + 1024 + 128 * len(self.names)

    def add(self, name: str, dtype: str, shape: Sequence[int], data: "bytes | np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Append a part."""
        self.names.append((name, dtype, list(shape)))
        self.parts.append(np.frombuffer(data, np.uint8))


def draft(label: Label, batch: object, state: bytes | None = None) -> Draft:
    """Take a batch apart. Raises ``UsageError`` for a value of an unknown type, naming its path."""
    tree, tensors = codec.split(batch, where="batch")
    out = Draft(label)
    for index, tensor in sorted(enumerate(tensors), key=lambda pair: -pair[1].element_size()):
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        known = _DTYPES.get(tensor.dtype)
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        out.add(f"t{index}" if known else f"o{index}", known or "U8", tensor.shape if known else [len(raw)], raw)
    out.add("tree", "U8", [len(tree)], tree)
    if state is not None:
        out.add("state", "U8", [len(state)], state)
    return out


def write(record: Draft, into: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    """Write a record over the whole of a mapped file."""
    header = _header(record, len(into))
    digest = xxhash.xxh3_64(header)
    at = _LENGTH.size + len(header)
    for part in record.parts:
        at = _copy(part, into, at, digest)
    into[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(header)), np.uint8)
    sealed = header.replace(_BLANK.encode(), digest.hexdigest().encode(), 1)
    into[_LENGTH.size : _LENGTH.size + len(sealed)] = np.frombuffer(sealed, np.uint8)


def read(
    source: "np.ndarray[tuple[int], np.dtype[np.uint8]]", *, fingerprint: str, allocate: Callable[[int], torch.Tensor] | None = None
) -> Content:
    """A private copy of a record, verified. Raises ``Refused`` saying what is wrong with the file."""
    header, head, begin = _parse(source)
    label, sections, used, told = _label(head)
    if label.fingerprint != fingerprint:
        raise Refused("it belongs to another data set, seed, batch size or rank")
    if begin + used > len(source):
        raise Refused(f"it ends at byte {len(source)}, its data at {begin + used}")
    flat = (allocate or _allocate)(used)
    digest = xxhash.xxh3_64(header.replace(told.encode(errors="replace"), _BLANK.encode(), 1))
    _copy(source[begin : begin + used], flat.numpy(), 0, digest)
    if digest.hexdigest() != told:
        raise Refused(f"its checksum is {digest.hexdigest()}, its header says {told}")
    try:
        return _content(label, sections, flat)
    except (*_FORGED, InstepError) as error:
        raise Refused(f"its header is forged: {type(error).__name__}: {error}") from error


def peek(source: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> Label:
    """The label alone, unverified. Raises ``Refused`` if there is none."""
    return _label(_parse(source)[1])[0]


def _content(label: Label, sections: "Sections", flat: torch.Tensor) -> Content:
    tree = _bytes(sections["tree"], flat)
    count = len(sections) - 1 - ("state" in sections)
    names = [f"t{index}" if f"t{index}" in sections else f"o{index}" for index in range(count)]
    kinds = [(sections[name].dtype or torch.uint8, sections[name].shape) for name in names]
    if any(name.startswith("o") for name in names):
        kinds = [(getattr(torch, spec.dtype), spec.shape) for spec in codec.specs(tree)]
    tensors = []
    for name, (dtype, shape) in zip(names, kinds, strict=True):
        part = flat[sections[name].begin : sections[name].end]
        tensors.append((part.view(dtype) if len(part) else torch.empty(0, dtype=dtype)).reshape(shape))
    state = _bytes(sections["state"], flat) if "state" in sections else None
    return Content(label, codec.decode(tree, tensors), state, size=len(flat))


def _bytes(section: "Section", flat: torch.Tensor) -> bytes:
    return flat[section.begin : section.end].numpy().tobytes()


def _allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _copy(part: Any, into: Any, at: int, digest: "xxhash.xxh3_64") -> int:
    """Copy and digest in one pass, in pieces that stay in the processor's cache; returns where the copy ends."""
    for start in range(0, len(part), _CHUNK):
        piece = part[start : start + _CHUNK]
        target = into[at : at + len(piece)]
        target[:] = piece
        digest.update(target)
        at += len(piece)
    return at


def _header(record: Draft, size: int) -> bytes:
    label = record.label
    metadata = {
        "format": FORMAT,
        "kind": label.kind,
        "at": ",".join(map(str, label.at)),
        "next": ",".join(map(str, label.next)),
        "fingerprint": label.fingerprint,
        "generation": str(label.generation),
        "used": str(record.used),
        "xxh3": _BLANK,
    }
    tree: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for (name, dtype, shape), part in zip(record.names, record.parts, strict=True):
        tree[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(part)]}
        at += len(part)
    room = len(json.dumps(tree)) + 96
    length = -(-(room + _LENGTH.size) // _ALIGN) * _ALIGN - _LENGTH.size
    rest = size - _LENGTH.size - length - at
    if rest < 0:
        raise Refused(f"a record of {at} bytes does not fit into a file of {size}")
    tree["pad"] = {"dtype": "U8", "shape": [rest], "data_offsets": [at, at + rest]}
    return json.dumps(tree).encode().ljust(length)


def _parse(source: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> tuple[bytes, dict[str, object], int]:
    if len(source) < _LENGTH.size:
        raise Refused(f"it has {len(source)} bytes")
    length = int(_LENGTH.unpack(source[: _LENGTH.size].tobytes())[0])
    if length > min(_MOST_HEADER, len(source) - _LENGTH.size):
        raise Refused(f"its header would have {length} bytes, the file has {len(source)}")
    header = source[_LENGTH.size : _LENGTH.size + length].tobytes()
    try:
        head = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Refused(f"its header is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise Refused("its header is no JSON object")
    return header, head, _LENGTH.size + length


class Section(NamedTuple):
    """Where a part lies in the data, and what it is. Tensors whose dtype safetensors has no name for are ``o...``, and bytes here."""

    begin: int
    end: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


Sections = dict[str, Section]


def _label(head: dict[str, object]) -> tuple[Label, Sections, int, str]:
    """Label, where each part lies, the bytes in use, and the checksum that the header tells."""
    try:
        metadata = cast(dict[str, str], head["__metadata__"])
        if metadata["format"] != FORMAT:
            raise Refused(f"its format is {metadata['format']!r}, expected {FORMAT!r}")
        kind, used, told = metadata["kind"], int(metadata["used"]), metadata["xxh3"]
        at, following = (At(*map(int, metadata[key].split(","))) for key in ("at", "next"))
        label = Label(cast(Kind, kind), at, following, metadata["fingerprint"], int(metadata["generation"]))
        sections = {name: _parsed(cast(dict[str, object], part)) for name, part in head.items() if name not in ("__metadata__", "pad")}
    except _FORGED as error:
        raise Refused(f"its header is forged or damaged: {type(error).__name__}: {error}") from error
    inside = all(0 <= section.begin <= section.end <= used for section in sections.values())
    if kind not in ("batch", "end", "error", "bypass") or not inside or "tree" not in sections or len(told) != len(_BLANK):
        raise Refused("its header is forged or damaged: a part lies outside of the data")
    return label, sections, used, told


def _parsed(part: dict[str, object]) -> Section:
    begin, end = cast(list[int], part["data_offsets"])
    shape, dtype = cast(list[int], part["shape"]), cast(str, part["dtype"])
    return Section(int(begin), int(end), _TORCH.get(dtype), tuple(int(size) for size in shape))
