"""``Device``: the one gloo device of a process, kept for its whole life so that its port never changes."""

from datetime import timedelta

import torch.distributed as dist

from instep_init_gloo.store import BookStore
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
        own = self.probe()
        self.host, self.port = own.host, own.port

    def probe(self) -> Endpoint:
        """Where the device listens, and the pair number that the next group will begin with."""
        store = BookStore(0, {})
        self.group(store, rank=0, size=1, timeout=1.0, threads=1)
        own = store.own
        return Endpoint(own.host, own.port, own.first + 1)

    def group(self, store: BookStore, *, rank: int, size: int, timeout: float, threads: int) -> dist.ProcessGroupGloo:
        """Connect one group; blocks up to ``timeout`` seconds, five times as long for peers that are to connect to us."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout)
        options._threads = threads
        return dist.ProcessGroupGloo(store, rank, size, options)
