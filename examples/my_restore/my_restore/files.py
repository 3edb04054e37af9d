"""A copy of a shard group in a file: length of the schema, schema, the bytes of all tensors, and a digest of all that."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from instep.errors import InstepError

_LENGTH = 8
_DIGEST = 32


def write(path: Path, schema: bytes, tensors: Sequence[Tensor]) -> None:
    """Write a copy; it has its name only once it is complete."""
    part = path.with_suffix(f".part-{os.getpid()}")
    digest = hashlib.blake2b(digest_size=_DIGEST)
    with part.open("wb") as file:
        for piece in (len(schema).to_bytes(_LENGTH, "little"), schema, *map(_bytes, tensors)):
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())
    part.replace(path)


def schema(path: Path) -> bytes:
    """The schema of a copy."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(_LENGTH), "little"))


def read(path: Path, tensors: Sequence[Tensor]) -> int:
    """Fill the tensors, which lie in schema order; the number of bytes. Raises ``InstepError`` if the copy is damaged."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    total = 0
    with path.open("rb") as file:
        head = file.read(_LENGTH)
        digest.update(head)
        digest.update(file.read(int.from_bytes(head, "little")))
        for tensor in tensors:
            data = bytearray(tensor.numel() * tensor.element_size())
            if file.readinto(data) != len(data):
                raise InstepError(f"{path} is shorter than its schema says; look at the disk")
            digest.update(data)
            if data:
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
            total += len(data)
        if file.read() != digest.digest():
            raise InstepError(f"{path} is damaged (digests differ); look at the disk")
    return total


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
