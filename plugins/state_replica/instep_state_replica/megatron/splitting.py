"""``optimizer.step()`` in parts: prepare, the commit's barrier, a local update, and the gather of parameters.

Megatron's own methods do the work; two attributes of one instance are replaced, no class is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from instep.torch.adapter import Port
from instep_state_replica.megatron.foreign import Chunk, MegatronOptimizer, Part, Result, distributed, parts, update


class SplitStep:
    """Stands in for ``step`` and ``step_with_ready_grads`` of the outermost optimizer."""

    def __init__(self, chunks: Sequence[Chunk], optimizer: MegatronOptimizer, port: Port) -> None:
        self._chunks, self._parts, self._port = chunks, parts(optimizer), port
        self._whole = optimizer.step
        self._updated = False
        overlapped = any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in chunks)
        self._gathers = any(map(distributed, self._parts)) and not overlapped
        optimizer.step, optimizer.step_with_ready_grads = self.step, self.ready

    def step(self) -> Result:
        """As Megatron's, which returns without any update when it finds an overflow: that too is a step that all ranks commit."""
        self._updated = False
        result = self._whole()
        if not self._updated:
            with self._port.update():
                pass
        return result

    def ready(self) -> bool:
        """Called by ``step`` once gradients are reduced and clipped."""
        self._updated = True
        with self._port.update(), _untimed(self._parts):
            done = [update(part) for part in self._parts]
        if self._gathers:
            self._port.publish(self._gather)
        return all(done)

    def _gather(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()


@contextmanager
def _untimed(optimizers: Sequence[Part]) -> Iterator[None]:
    """Megatron's timers may put a barrier around what they time; a rank that rolls forward would wait in it for ever."""
    configs: list[Any] = [part.config for part in optimizers]
    timers = [config.timers for config in configs]
    for config in configs:
        config.timers = None
    try:
        yield
    finally:
        for config, kept in zip(configs, timers, strict=True):
            config.timers = kept
