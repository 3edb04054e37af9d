"""What holds on to a communicator by itself: CUDA graphs that captured its kernels, and memory pools registered with it.

Neither survives a swap. A graph would launch kernels of a communicator that is gone, so its replay is refused; a pool is only slower
until it is registered again, so there is a warning. The wrapper is a context manager over torch's own classes, and undoes itself.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from instep.errors import UsageError

log = logging.getLogger(__name__)
_STAMP = "_instep_incarnation"


class Captured:
    """Watches the captures of ``graph`` (torch.cuda.CUDAGraph) and the registrations of ``backend`` (ProcessGroupNCCL)."""

    def __init__(self, graph: Any, backend: Any) -> None:
        self._graph, self._backend = graph, backend
        self._live: list[Any] = []
        self._incarnation = 0
        self._pools: list[tuple[int, str]] = []
        self._stock: dict[tuple[Any, str], Any] = {}
        self._wrap(graph, "capture_begin", self._begin)
        self._wrap(graph, "capture_end", self._end)
        self._wrap(graph, "replay", self._replay)
        self._wrap(backend, "register_mem_pool", self._registered)

    def close(self) -> None:
        """Undo the wrapping."""
        for (owner, name), method in self._stock.items():
            setattr(owner, name, method)
        self._stock.clear()

    def swapped(self, incarnation: int, live: Sequence[object]) -> None:
        """The communicators of an incarnation are ``live``; those before it are gone."""
        gone = sorted({label for number, label in self._pools if number < incarnation})
        if gone:
            log.warning(
                "memory pools were registered with NCCL communicators that are gone (%s): collectives on them copy until they are "
                "registered again; do that inside the block, which runs again after a recovery",
                ", ".join(gone),
            )
        self._pools = [pool for pool in self._pools if pool[0] >= incarnation]
        self._incarnation = incarnation
        self._live = list(live)

    def _wrap(self, owner: Any, name: str, around: Callable[..., object]) -> None:
        stock = getattr(owner, name, None)
        if stock is None:
            return

        def method(this: Any, *args: object, **kwargs: object) -> object:
            return around(stock, this, *args, **kwargs)

        method.__name__, method.__doc__ = name, stock.__doc__
        self._stock[owner, name] = stock
        setattr(owner, name, method)

    def _issued(self) -> list[int]:
        return [int(backend._get_sequence_number_for_group()) for backend in self._live]

    def _begin(self, stock: Callable[..., object], graph: Any, *args: object, **kwargs: object) -> object:
        graph._instep_issued = self._issued()
        setattr(graph, _STAMP, None)
        return stock(graph, *args, **kwargs)

    def _end(self, stock: Callable[..., object], graph: Any, *args: object, **kwargs: object) -> object:
        out = stock(graph, *args, **kwargs)
        if getattr(graph, "_instep_issued", None) != self._issued():
            setattr(graph, _STAMP, self._incarnation)
        return out

    def _replay(self, stock: Callable[..., object], graph: Any, *args: object, **kwargs: object) -> object:
        captured = getattr(graph, _STAMP, None)
        if captured is not None and captured < self._incarnation:
            raise UsageError(
                f"this CUDA graph captured NCCL collectives in incarnation {captured}, and its communicators are gone (now "
                f"{self._incarnation}): capture it inside the block, which runs again after a recovery"
            )
        return stock(graph, *args, **kwargs)

    def _registered(self, stock: Callable[..., object], backend: Any, *args: object, **kwargs: object) -> object:
        out = stock(backend, *args, **kwargs)
        self._pools.append((self._incarnation, str(backend.options.group_name) if hasattr(backend, "options") else "?"))
        return out
