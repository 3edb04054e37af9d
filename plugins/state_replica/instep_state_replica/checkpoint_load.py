"""Loads a checkpoint into this rank: shard groups from whoever wrote them, private state from its own part, every byte checked."""

import time
from contextlib import ExitStack

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from instep.errors import InstepError, UsageError
from instep.hooks import Holding, Recovery
from instep.torch.digest import memory
from instep.torch.overlay import names
from instep_state_replica import checkpoint_files as files


class Damaged(InstepError):  # noqa: N818 - an outcome of loading
    """A checkpoint cannot be loaded, now or ever. ``name`` is its own, ``why`` continues a sentence about it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"checkpoint {name} is {why}")
        self.name, self.why = name, why


def load(checkpoint: files.Checkpoint, recovery: Recovery, holding: Holding) -> int:
    """Bring this rank to the state of ``checkpoint``: shared state, gradient buckets, and the record of its step.

    Returns the number of bytes read.

    Raises:
        Damaged: a part cannot be read, a digest differs, or it was saved by a script that protects other objects.
        InstepError: the deadline passed.
    """
    recovery.point("restore")
    with ExitStack() as stack:
        reader = _Reader(checkpoint, recovery, stack)
        schemas = []
        for index, share in enumerate(recovery.shards):
            if index == len(recovery.shards) // 2:
                recovery.point("mid_transfer")
            schema = bytes(memory(reader.get(f"{share.name}/schema")))
            try:
                landing = share.destination(schema, staged=False)
            except UsageError as error:
                raise Damaged(checkpoint.name, f"of another script ({error})") from error
            for key, tensor in zip(names(schema), landing, strict=True):
                reader.fill(f"{share.name}/{key}", tensor)
            schemas.append(schema)
        record = bytes(memory(reader.get(f"record/{recovery.rank}")))
        for share, schema in zip(recovery.shards, schemas, strict=True):
            share.accept()
            if share.layouts:
                share.align(schema)
        holding.take(checkpoint.step, record)
        return reader.bytes


class _Reader:
    """Tensors by key, from all parts, opened when they are first needed."""

    def __init__(self, checkpoint: files.Checkpoint, recovery: Recovery, stack: ExitStack) -> None:
        self._checkpoint, self._recovery, self._stack = checkpoint, recovery, stack
        self._where = {key: receipt for receipt in checkpoint.receipts for key in receipt.digests}
        self._open: dict[int, object] = {}
        self.bytes = 0

    def get(self, key: str) -> Tensor:
        """A tensor whose bytes are those that were written."""
        self._recovery.check()
        name, receipt = self._checkpoint.name, self._where.get(key)
        if time.monotonic() > self._recovery.deadline:
            raise InstepError(f"checkpoint {name}: rank {self._recovery.rank} did not load it in time; raise deadlines.restore")
        if receipt is None:
            raise Damaged(name, f"of another script (it has no {key!r}, which rank {self._recovery.rank} protects)")
        try:
            if receipt.rank not in self._open:
                handle = safe_open(files.part(self._checkpoint.folder, receipt.rank), framework="pt")
                self._open[receipt.rank] = self._stack.enter_context(handle)
            tensor = self._open[receipt.rank].get_tensor(key)  # type: ignore[attr-defined]
        except (OSError, SafetensorError) as error:
            raise Damaged(name, f"damaged: {key!r} cannot be read from the part of rank {receipt.rank} ({error})") from error
        if not isinstance(tensor, Tensor) or xxhash.xxh3_64_hexdigest(memory(tensor)) != receipt.digests[key]:
            raise Damaged(name, f"damaged: {key!r} in the part of rank {receipt.rank} is not what was written (digests differ)")
        self.bytes += tensor.nbytes
        return tensor

    def fill(self, key: str, target: Tensor) -> None:
        """Copy a tensor's bytes to where they belong."""
        source = self.get(key).reshape(-1).view(torch.uint8)
        if source.numel() != target.nbytes:
            raise Damaged(self._checkpoint.name, f"damaged: {key!r} has {source.numel()} bytes, its schema says {target.nbytes}")
        with torch.no_grad():
            target.copy_(source.view(target.dtype).reshape(target.shape))
