"""Tensors as plain bytes in host memory."""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from instep.torch.digest import memory


class Buffers:
    """The bytes of contiguous tensors: their own memory if that is the host's, else a staging copy.

    ``layout`` is a digest of the types and shapes: two ranks with equal layouts mean the same by a range of bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], *, outgoing: bool) -> None:
        self._tensors = tensors
        self._host = [self._staged(tensor, outgoing=outgoing) for tensor in tensors]
        self.views = [memory(tensor) for tensor in self._host]
        self.total = sum(len(view) for view in self.views)
        self.layout = int(xxhash.xxh3_64_intdigest(repr([(str(t.dtype), tuple(t.shape)) for t in tensors]).encode()))

    def store(self) -> None:
        """Bring what was received into staging copies to the tensors themselves."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            if host is not tensor:
                tensor.copy_(host)

    @staticmethod
    def _staged(tensor: Tensor, *, outgoing: bool) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        return tensor.cpu() if outgoing else torch.empty(tensor.shape, dtype=tensor.dtype)
