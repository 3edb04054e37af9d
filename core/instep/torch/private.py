"""Private state of a rank: random generators, module buffers, training flags, cursors, private objects; kept in its record.

A commit writes the state for step s+1 into one of three slots before its barrier; a recovery reloads the slot of the agreed step on
every rank.
"""

import struct
from collections.abc import Mapping
from typing import Protocol

import xxhash
from torch import nn

from instep import codec
from instep.agent.records import Slots
from instep.errors import InstepError
from instep.torch import rng
from instep.torch.buffers import Buffers

_SPARE = 64 * 1024
_HEAD = struct.Struct("<III")
_COPY = struct.Struct("<QQ")


class Cursor(Protocol):
    """A position that can be recorded and returned to: loaders and generators."""

    def state(self) -> object:
        """The position, as the codec can hold it."""

    def load(self, state: object) -> None:
        """Return to a recorded position."""


class Stateful(Protocol):
    """An object with the two methods of every ``state_dict`` object."""

    def state_dict(self) -> Mapping[str, object]:
        """The state."""

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Take the state over."""


class Private:
    """Collects private state, writes it into slots, and reloads it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._modules: dict[str, nn.Module] = {}
        self._cursors: dict[str, Cursor] = {}
        self._objects: dict[str, Stateful] = {}
        self._flags: list[nn.Module] = []
        self._buffers = Buffers({})
        self._slots: Slots | None = None
        self._rng: rng.Parts = (b"",) * 4
        self._plain: tuple[rng.Parts, bytes, bytes] = self._rng, b"", b""
        self._generators = rng.Generators()

    def add_module(self, name: str, module: nn.Module) -> None:
        """Buffers and training flags of a module."""
        self._modules[name] = module

    def add_cursor(self, name: str, cursor: Cursor) -> None:
        """The position of a loader or generator."""
        self._cursors[name] = cursor

    def add_object(self, name: str, obj: Stateful) -> None:
        """An object that each rank has for itself. Raises ``UsageError`` if the codec does not know its state."""
        codec.encode(obj.state_dict(), where=f"private.{name}")
        self._objects[name] = obj

    def freeze(self) -> None:
        """Fix the layout at the first block and reserve the slots. Raises ``InstepError`` when memory is short."""
        self._flags = list(dict.fromkeys(m for root in self._modules.values() for m in root.modules()))
        self._buffers = Buffers(self._modules)
        self._slots = Slots(self._fd, meta=2 * len(self._meta()) + _SPARE, flat=self._buffers.size)
        self._buffers.bind(self._slots)

    @property
    def frozen(self) -> bool:
        """Whether the layout is fixed."""
        return self._slots is not None

    def write(self, step: int) -> None:
        """Record the present state as the one of ``step``."""
        slots = self._ready()
        slots.begin(step)
        self._buffers.write(step)
        slots.end(step, self._meta(), self._buffers.layout)

    def load(self, step: int) -> None:
        """Reload the state of ``step``. Raises ``InstepError`` when the record does not hold it."""
        meta = self._ready().load(step, self._buffers.layout)
        if meta is None:
            raise InstepError(f"the record of this rank holds no private state of step {step} with the present layout of buffers")
        self._buffers.load(step)
        self._load_meta(meta)

    def capture(self, step: int) -> bytes:
        """A copy of the recorded state of ``step``, for ``take``. Raises ``InstepError`` when the record does not hold it."""
        slots = self._ready()
        meta = slots.load(step, self._buffers.layout)
        if meta is None:
            raise InstepError(f"the record of this rank holds no private state of step {step}")
        return _COPY.pack(self._buffers.layout, len(meta)) + meta + bytes(slots.flat(step))

    def take(self, step: int, copy: bytes) -> None:
        """Make a copy from ``capture`` the recorded state of ``step``; ``load`` brings it to the rank.

        Raises ``InstepError`` when it is damaged, or the modules have other buffers than there.
        """
        slots = self._ready()
        layout, size = _COPY.unpack_from(copy) if len(copy) >= _COPY.size else (0, 0)
        meta, flat = copy[_COPY.size : _COPY.size + size], copy[_COPY.size + size :]
        if layout != self._buffers.layout or len(flat) != self._buffers.size:
            raise InstepError("a copy of private state has other buffers than the modules of this rank; it is of another script")
        slots.begin(step)
        slots.flat(step)[:] = flat
        slots.end(step, meta, layout)
        self._buffers.forget(step)

    @property
    def buffers(self) -> Buffers:
        """The private buffers."""
        return self._buffers

    def drew(self) -> bool:
        """Whether a random generator moved since the last ``write``."""
        return self._generators.parts() != self._rng

    def digests(self) -> dict[str, str]:
        """A digest for each piece of private state, by name."""
        out = {"rng": xxhash.xxh3_64_hexdigest(rng.capture()), "training": xxhash.xxh3_64_hexdigest(self._training())}
        out |= self._buffers.digests()
        for name, cursor in self._cursors.items():
            out[f"cursor.{name}"] = xxhash.xxh3_64_hexdigest(codec.encode(cursor.state()))
        for name, obj in self._objects.items():
            out[f"private.{name}"] = xxhash.xxh3_64_hexdigest(codec.encode(obj.state_dict()))
        return out

    def _meta(self) -> bytes:
        self._rng, flags = self._generators.parts(), self._training()
        if not self._cursors and not self._objects:
            if (self._rng, flags) != self._plain[:2]:
                self._plain = self._rng, flags, self._joined(flags, b"")
            return self._plain[2]
        return self._joined(flags, self._tree())

    def _joined(self, flags: bytes, tree: bytes) -> bytes:
        generators = rng.join(self._rng)
        return b"".join((_HEAD.pack(len(generators), len(flags), len(tree)), generators, flags, tree))

    def _tree(self) -> bytes:
        return codec.encode(
            {
                "cursors": {name: cursor.state() for name, cursor in self._cursors.items()},
                "objects": {name: obj.state_dict() for name, obj in self._objects.items()},
            }
        )

    def _load_meta(self, meta: bytes) -> None:
        rng_size, flag_size, tree_size = _HEAD.unpack_from(meta)
        at = _HEAD.size
        flags = meta[at + rng_size : at + rng_size + flag_size]
        for module, training in zip(self._flags, flags, strict=True):
            module.training = bool(training)
        if tree_size:
            self._load_tree(codec.decode(meta[at + rng_size + flag_size : at + rng_size + flag_size + tree_size]))
        # Last, since rebuilding a loader may draw.
        rng.restore(meta[at : at + rng_size])

    def _load_tree(self, tree: object) -> None:
        if not isinstance(tree, dict):
            raise InstepError("the record's tree of private state is damaged")
        for name, state in tree["cursors"].items():
            self._cursors[name].load(state)
        for name, state in tree["objects"].items():
            self._objects[name].load_state_dict(state)

    def _training(self) -> bytes:
        return bytes([module.training for module in self._flags])

    def _ready(self) -> Slots:
        if self._slots is None:
            raise InstepError("private state is written before the first block")
        return self._slots
