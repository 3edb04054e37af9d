"""``Device``: the one gloo device of a process, kept for its whole life so that its port never changes."""

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from instep_init_gloo.store import Probe, Rendezvous
from instep_init_gloo.wire import Endpoint


class Device:
    """A gloo device and the numbers it gives to pairs.

    Every group of size n takes n consecutive numbers, so peers can compute where to connect: no message is needed. A group of
    size one tells port and next number, and takes that number.
    """

    def __init__(self, *, host: str, interface: str | None) -> None:
        """Listen on ``interface`` if given, else on the address that ``host`` resolves to."""
        if interface is None:
            self._device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        else:
            self._device = dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
        self._prefix = ""
        self._promised = 0
        own = self.probe()
        self.host, self.port = own.host, own.port

    def probe(self) -> Endpoint:
        """Where the device listens, and the pair number that the next group will begin with."""
        probe = Probe()
        self._group(probe, rank=0, size=1, timeout=1.0, threads=1)
        self._prefix = probe.prefix
        own = probe.own
        return Endpoint(own.host, own.port, own.first + 1)

    def unused(self) -> Endpoint:
        """Like ``probe``, behind every number that was promised before.

        A peer may have connected to a promised number that this rank then never took: gloo would give its dead socket to the next group.
        """
        own = self.probe()
        while own.first < self._promised:
            own = self.probe()
        return own

    def promise(self, end: int) -> None:
        """Peers were told of pair numbers below ``end``."""
        self._promised = max(self._promised, end)

    def rendezvous(self, rank: int, endpoints: Mapping[int, Endpoint]) -> Rendezvous:
        """The rendezvous of a group that is to be connected on this device."""
        return Rendezvous(rank, endpoints, self._prefix)

    def connect(self, at: Rendezvous, *, rank: int, size: int, timeout: float, threads: int) -> dist.ProcessGroupGloo:
        """Connect one group; blocks up to ``timeout`` seconds, five times as long for peers that are to connect to us."""
        return self._group(at.store, rank=rank, size=size, timeout=timeout, threads=threads)

    def _group(self, store: Store, *, rank: int, size: int, timeout: float, threads: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout)
        options._threads = threads
        return dist.ProcessGroupGloo(store, rank, size, options)
