"""``NcclRank``: NCCL on one rank, from the first group that asks for it until the process ends."""

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from instep.errors import CommsError, ConfigError
from instep.hooks import CommsRequest, Job
from instep.model import Json
from instep_init_nccl import backend, health
from instep_init_nccl.backend import Aborting, NcclCommunicator
from instep_init_nccl.captured import Captured
from instep_init_nccl.connect import Connecting, Limits, Wanted
from instep_init_nccl.mini_root import MiniRoot
from instep_init_nccl.store import Place


@dataclass(frozen=True)
class Choices:
    """The plugin's settings that a rank needs."""

    port: int | None
    share_gpus: bool
    revoke: bool
    limits: Limits


class NcclRank:
    """Opens the mini root. Raises ``ConfigError`` when NCCL cannot be used here, naming the rank and the remedy."""

    def __init__(self, job: Job, choices: Choices, *, plugin: str) -> None:
        self._job, self._choices, self._plugin = job, choices, plugin
        self._device = health.device_of(job.rank, job.local_rank, share=choices.share_gpus)
        version = torch.cuda.nccl.version()
        self._version, self._head = health.version_of(job.rank, version), backend.head(version)
        port = health.port_of(job.rank, job.local_rank, choices.port)
        try:
            self._root = MiniRoot(secret=job.secret, host=socket.gethostbyname(job.host), port=port)
        except CommsError as error:
            raise ConfigError(f"rank {job.rank}: {error}; choose another plugins.init_nccl.port, or none") from error
        self._captured = Captured(torch.cuda.CUDAGraph, torch.distributed.ProcessGroupNCCL)
        self._live: list[tuple[int, NcclCommunicator]] = []
        self._swaps: Counter[str] = Counter()

    def note(self) -> Mapping[str, Json]:
        """What peers must know."""
        return {"host": self._root.host, "port": self._root.port, "nccl": self._version, "swaps": max(self._swaps.values(), default=0)}

    def connect(self, request: CommsRequest) -> list[NcclCommunicator]:
        """Connect the groups of a request, in order."""
        self._root.advance(request.incarnation)
        wanted = [
            Wanted(group, Place(request.incarnation, group.name, group.ranks.index(request.rank), where), request.options.get(group.name))
            for group in request.groups
            for where in [health.roots(group, request.book, self._plugin)]
        ]
        limits = self._choices.limits
        connecting = Connecting(self._root, wanted, rank=request.rank, device=self._device, head=self._head, limits=limits)
        connecting.start()
        made = connecting.result(request.check)
        self._swaps.update(group.name for group in request.groups)
        self._live = [one for one in self._live if not one[1].aborted.is_set()] + [(request.incarnation, one) for one in made]
        self._captured.swapped(request.incarnation, [one.backend for number, one in self._live if number == request.incarnation])
        return made

    def quiesce(self, incarnation: int) -> None:
        """Abort every communicator older than ``incarnation``, all in one call. Raises ``CommsError`` when that takes too long."""
        self._root.advance(incarnation)
        old = [one for number, one in self._live if number < incarnation and not one.aborted.is_set()]
        if old:
            Aborting(old, revoking=self._choices.revoke).wait(self._choices.limits.abort, rank=self._job.rank)
        self._live = [one for one in self._live if one[0] >= incarnation]

    def close(self) -> None:
        """Give everything back but communicators, which end with the process."""
        self._captured.close()
        self._root.close()
