"""Module buffers in the record: a fixed layout, copied at each commit, reloaded at each recovery.

Tensor versions do not tell whether a buffer changed: batch norm writes its statistics without moving them, and so does ``.data``. So
small buffers are always copied; large ones, such as masks, only when their version moved, unless a norm layer owns them.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from instep.agent.records import SLOTS, Slots
from instep.errors import UsageError
from instep.torch.dtensor import local, sharded
from instep.torch.tape import raw

_ALIGN = 64
_SMALL = 1 << 20


class Buffers:
    """All private buffers of the protected modules, each once."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._places: list[tuple[str, nn.Module, str]] = []
        self._shared: set[str] = set()
        seen: set[int] = set()
        for name, root in modules.items():
            for prefix, owner in root.named_modules():
                for key, buffer in owner._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        self._places.append((".".join(p for p in (name, prefix, key) if p), owner, key))
        tensors = self._tensors()
        self._always = [isinstance(o, _NormBase) or t.nbytes <= _SMALL for (_, o, _), t in zip(self._places, tensors, strict=True)]
        self._offsets, self.size = [], 0
        for tensor in tensors:
            self._offsets.append(self.size)
            self.size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        shapes = repr([(n, tuple(t.shape), str(t.dtype)) for (n, _, _), t in zip(self._places, tensors, strict=True)])
        self.layout = xxhash.xxh3_64_intdigest(shapes.encode())
        self._views: tuple[list[Tensor], ...] = tuple([] for _ in range(SLOTS))
        self._marks: tuple[list[_Mark | None], ...] = tuple([] for _ in range(SLOTS))
        self._entry: list[_Mark] = []

    def bind(self, slots: Slots) -> None:
        """Place the buffers in the flat regions of all slots."""
        for slot in range(SLOTS):
            flat = slots.flat(slot)
            self._views[slot][:] = [_view(flat, at, t) for at, t in zip(self._offsets, self._tensors(), strict=True)]
            self._marks[slot][:] = [None] * len(self._places)

    def write(self, step: int) -> None:
        """Copy into the slot of ``step`` what may have changed since it was written."""
        if not self._places:
            return
        views, marks, tensors = self._views[step % SLOTS], self._marks[step % SLOTS], self._tensors()
        self._check(tensors, views)
        stale = [i for i in self._mine() if self._always[i] or marks[i] != _Mark(tensors[i])]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([views[i] for i in stale], [tensors[i].detach() for i in stale])
        for i in stale:
            marks[i] = _Mark(tensors[i])
        self._entry = [_Mark(t) for t in tensors]

    def load(self, step: int) -> None:
        """Copy back from the slot of ``step`` what may differ from it.

        A tensor that was put in place of the recorded one may belong to somebody else: it is replaced, not written to.
        """
        views, marks, tensors = self._views[step % SLOTS], self._marks[step % SLOTS], self._tensors()
        stale = [i for i in self._mine() if self._always[i] or marks[i] != _Mark(tensors[i])]
        with torch.no_grad():
            for i in stale:
                mark, (_, owner, key) = marks[i], self._places[i]
                if mark is None or mark.of(tensors[i]) or sharded(owner._buffers[key]):  # type: ignore[arg-type]
                    tensors[i].copy_(views[i])
                else:
                    owner._buffers[key] = tensors[i] = views[i].to(tensors[i].device, copy=True)
                marks[i] = _Mark(tensors[i])

    def forget(self, step: int) -> None:
        """The slot of ``step`` was written by somebody else."""
        self._marks[step % SLOTS][:] = [None] * len(self._places)

    def moved(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers whose version moved since the last ``write``: in a commit body, so they are shared from now on.

        Raises ``UsageError`` for one that was replaced by another tensor: whoever holds the old one would restore that.
        """
        for i, tensor in enumerate(self._tensors()):
            name, entry = self._places[i][0], self._entry[i]
            if not entry.of(tensor):
                raise UsageError(f"buffer {name!r} was replaced in a commit body; change it in place there (copy_, add_, mul_, lerp_)")
            if name not in self._shared and entry.version != _version(tensor):
                self._shared.add(name)
                yield name, tensor

    def share(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Give up buffers that other ranks found to be shared; yields those that were private here until now."""
        tensors = self._tensors()
        for i, (name, _, _) in enumerate(self._places):
            if name in names and name not in self._shared:
                self._shared.add(name)
                yield name, tensors[i]

    def share_exactly(self, names: set[str]) -> None:
        """Share these and no others: those of a state that was loaded as a whole."""
        self._shared = {name for name, _, _ in self._places if name in names}

    @property
    def shared(self) -> list[str]:
        """Names of buffers that turned out to be shared."""
        return sorted(self._shared)

    def digests(self) -> dict[str, str]:
        """A digest of each private buffer, by name."""
        tensors = self._tensors()
        return {f"buffer.{self._places[i][0]}": xxhash.xxh3_64_hexdigest(raw(tensors[i])) for i in self._mine()}

    def _mine(self) -> list[int]:
        return [i for i, (name, _, _) in enumerate(self._places) if name not in self._shared]

    def _tensors(self) -> list[Tensor]:
        tensors = []
        for name, owner, key in self._places:
            tensor = owner._buffers[key]
            if tensor is None:
                raise UsageError(f"buffer {name!r} became None; private state must keep its shape after the first block starts")
            tensors.append(local(tensor))
        return tensors

    def _check(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        for (name, _, _), tensor, view in zip(self._places, tensors, views, strict=True):
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise UsageError(
                    f"buffer {name!r} changed from {tuple(view.shape)} {view.dtype} to {tuple(tensor.shape)} {tensor.dtype}; "
                    "private state must keep its shape after the first block starts"
                )


class _Mark:
    """Identity and version of a tensor. Holds the tensor, so that a new one cannot take its place unnoticed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.version = tensor, _version(tensor)

    def of(self, tensor: Tensor) -> bool:
        """Whether it is a mark of this very tensor."""
        return self._tensor is tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self.version >= 0 and other.of(self._tensor) and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _view(flat: memoryview, offset: int, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(flat, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)
