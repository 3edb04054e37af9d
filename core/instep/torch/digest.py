"""Order-sensitive 64-bit digests of tensors: equal bytes in equal order, and nothing else, give equal digests.

The digest of a list of tensors is xxh3_64 over, for each tensor, its size in bytes and the xxh3_64 of each of its 64 KiB chunks (the
last one may be shorter), all as little-endian 64-bit words. A version for GPUs must give the same number: it digests the chunks of
the contiguous bytes independently of each other, on the device, and brings only the 8 bytes of each chunk to the host.
"""

import struct
from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

CHUNK = 64 * 1024
"""Bytes of a tensor that are digested by themselves."""


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to them writes to the tensor.

    Raises:
        ValueError: the tensor is not contiguous, or not in host memory.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a contiguous tensor in host memory is needed, not {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself if its bytes are its value, else a contiguous copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def digest(tensors: Sequence[Tensor], *, go_on: Callable[[], object] = bool) -> int:
    """One 64-bit digest of all ``tensors``, in order; types and shapes are the caller's to compare. ``go_on`` may raise, to stop it."""
    whole = xxhash.xxh3_64()
    for tensor in tensors:
        go_on()
        data = memory(plain(tensor).cpu())
        chunks = [xxhash.xxh3_64_intdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
        whole.update(struct.pack(f"<{len(chunks) + 1}Q", len(data), *chunks))
    return int(whole.intdigest())
