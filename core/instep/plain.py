"""The session without recovery: the same calls, passed through, when nothing watches over the job or instep is switched off."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from instep.agent.channel import Environment
from instep.block import check_kind
from instep.errors import UsageError
from instep.model import Json
from instep.torch import loaders

P = ParamSpec("P")
R = TypeVar("R")


class PlainSession:
    """Behaves like ``Session`` in a run without faults."""

    incarnation = 0
    incidents = 0

    def __init__(self, *, step: int) -> None:
        environment = Environment.read()
        self.rank, self.world_size, self.local_rank = environment.rank, environment.world_size, environment.local_rank
        self.step = step
        self._inside = self._running = False
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if self.world_size > 1:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def protect(self, *, private: Mapping[str, object] | None = None, **objects: object) -> None:
        """Give loaders their ``epoch``; nothing else is needed without recovery."""
        for name, obj in {**objects, **(private or {})}.items():
            loaders.adopt(name, obj, on_delivery=lambda: None)

    def recoverable(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, run once."""
        check_kind(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._running:
                raise UsageError("a block inside another block")
            self._running = True
            try:
                return function(*args, **kwargs)
            finally:
                self._running = False

        return run

    def commit(self) -> AbstractContextManager[None]:
        """Count a step."""
        return self._counted()

    def on_checkpoint(self, load: Callable[[int | None], int]) -> Callable[[int | None], int]:
        """Nothing is ever loaded."""
        return load

    def once(self, function: Callable[[], Json]) -> Json:
        """Run ``function``."""
        return function()

    def plugin(self, name: str) -> None:
        """No plugin is loaded."""

    def point(self, name: str) -> None:
        """No fault is placed."""

    def close(self) -> None:
        """Nothing to give back."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._running or self._inside:
            raise UsageError("session.commit() belongs once into each step of a recoverable block")
        self._inside = True
        try:
            yield
            self.step += 1
        finally:
            self._inside = False
