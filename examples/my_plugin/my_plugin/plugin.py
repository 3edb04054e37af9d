"""``my_plugin``: a loss that is not finite has the step repeated, then the rank replaced."""

import logging
import math
import os
import time
from typing import ClassVar, SupportsFloat

from pydantic import Field, PrivateAttr

import instep
from instep.hooks import Interruption, Job
from instep.model import Fault

NAME = "my_plugin"
EXIT_CODE = 75
log = logging.getLogger(__name__)


class MyPlugin(instep.Plugin):
    """Watches the loss that the script shows it, and judges at each commit, before any rank changes its weights."""

    HOOK_API: ClassVar[int] = 1

    retries: int = Field(default=1, ge=0, description="times that a step is repeated before its rank is replaced")

    _rank: int = PrivateAttr(default=0)
    _loss: float = PrivateAttr(default=0.0)
    _tries: int = PrivateAttr(default=0)

    def watch(self, loss: SupportsFloat) -> None:
        """Show the loss of this step. A tensor on a GPU is waited for."""
        self._loss = float(loss)

    @instep.hookimpl
    def start(self, job: Job) -> None:
        """Remember the rank."""
        self._rank = job.rank

    @instep.hookimpl
    def detect(self) -> Fault | None:
        """A fault repeats the step on all ranks; a death has the rank replaced by a new process first."""
        if math.isfinite(self._loss):
            return None
        detail = f"the loss of rank {self._rank} is {self._loss}"
        if self._tries >= self.retries:
            log.error("%s after %d tries: this process ends, to be replaced", detail, self._tries + 1)
            os._exit(EXIT_CODE)
        self._tries += 1
        return Fault(
            kind="exception", ranks=(self._rank,), detail=detail, detected_by=NAME, at=time.monotonic(), signature=f"{NAME}:{self._rank}"
        )

    @instep.hookimpl
    def committed(self, step: int) -> None:
        """The step went well in the end."""
        self._tries = 0

    @instep.hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """The step will be repeated."""
        self._loss = 0.0
