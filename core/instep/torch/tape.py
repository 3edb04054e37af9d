"""The tape of set-up results: what the collectives outside blocks gave, so that a replacement gets the same without its peers.

Results of parameter synchronisation (DDP's constructor) are not kept: parameters come from a donor later. Results beyond the limit
are kept as a digest only; if loopback gives something else then, the script cannot be replayed and an error names the call.
"""

import json
import os
import struct
from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

from instep.errors import UsageError
from instep.torch.frames import parameter_sync

LIMIT = 64 * 1024 * 1024
_DIGEST = 8
_HEAD = struct.Struct("<II")


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Tape:
    """An append-only file of results in call order. One tape serves all births of a rank."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._kept = 0
        self._calls = 0

    def record(self, label: str, op: str, outputs: Sequence[Tensor]) -> None:
        """Append one result."""
        self.reserve(label, op, outputs)()

    def reserve(self, label: str, op: str, outputs: Sequence[Tensor]) -> Callable[[], None]:
        """Append one call; the function returned adds its result, once ``outputs`` hold it."""
        size = sum(t.numel() * t.element_size() for t in outputs)
        keep = "skip" if parameter_sync() else "data" if self._kept + size <= LIMIT else "digest"
        self._kept += size if keep == "data" else 0
        head = json.dumps([label, op, keep, [[str(t.dtype), list(t.shape)] for t in outputs]]).encode()
        length = {"skip": 0, "data": size, "digest": _DIGEST}[keep]
        at = self._at + os.pwrite(self._fd, _HEAD.pack(len(head), length) + head, self._at)
        os.pwrite(self._fd, bytes(length), at)
        self._at = at + length
        self._calls += 1

        def fill() -> None:
            if keep != "skip":
                os.pwrite(self._fd, b"".join(bytes(raw(t)) for t in outputs) if keep == "data" else _digest(outputs), at)

        return fill

    def replay(self, label: str, op: str, outputs: Sequence[Tensor]) -> None:
        """Write the recorded result of this call into ``outputs``, which hold the loopback result. ``UsageError`` on another sequence."""
        sizes = os.pread(self._fd, _HEAD.size, self._at)
        if len(sizes) < _HEAD.size:
            raise UsageError(
                f"the replacement made a collective that its predecessor did not make: call {self._calls}, {op} on {label!r}. "
                "Set-up before the block must make the same collectives on every birth of a rank"
            )
        head_size, body_size = _HEAD.unpack(sizes)
        head, body = os.pread(self._fd, head_size, self._at + _HEAD.size), os.pread(self._fd, body_size, self._at + _HEAD.size + head_size)
        then_label, then_op, keep, shapes = json.loads(head)
        now = [[str(t.dtype), list(t.shape)] for t in outputs]
        if (then_label, then_op, shapes) != (label, op, now):
            raise UsageError(
                f"set-up collective {self._calls} of the replacement is {op} on {label!r} of {now}, its predecessor made {then_op} "
                f"on {then_label!r} of {shapes}: set-up before the block must not depend on birth, time or unseeded randomness"
            )
        self._play(keep, body, outputs, call=f"{op} on {label!r} (call {self._calls})")
        self._at += _HEAD.size + head_size + body_size
        self._kept += body_size if keep == "data" else 0
        self._calls += 1

    def finish(self) -> None:
        """The replacement joins. Raises ``UsageError`` when its predecessor had made further collectives."""
        sizes = os.pread(self._fd, _HEAD.size, self._at)
        if len(sizes) == _HEAD.size:
            label, op, *_ = json.loads(os.pread(self._fd, _HEAD.unpack(sizes)[0], self._at + _HEAD.size))
            raise UsageError(
                f"the replacement did not make a set-up collective that its predecessor made: call {self._calls}, {op} on {label!r}. "
                "Set-up before the block must make the same collectives on every birth of a rank"
            )

    def _play(self, keep: str, body: bytes, outputs: Sequence[Tensor], *, call: str) -> None:
        if keep == "digest" and _digest(outputs) != body:
            raise UsageError(
                f"the result of set-up collective {call} is larger than the {LIMIT} bytes kept for replacements, and is not what "
                "one rank alone gets: protect what it fills, or read it from storage on every rank"
            )
        at = 0
        for tensor in outputs if keep == "data" else ():
            size = tensor.numel() * tensor.element_size()
            if size:
                piece = torch.frombuffer(bytearray(body[at : at + size]), dtype=tensor.dtype).view(tensor.shape)
                tensor.detach().copy_(piece)
            at += size


def _digest(outputs: Sequence[Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for tensor in outputs:
        digest.update(raw(tensor))
    return digest.digest()
