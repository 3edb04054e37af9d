"""``BookStore``: the rendezvous store of one group, which answers from the address book and talks to nobody."""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from instep.errors import CommsError
from instep_init_gloo.wire import Endpoint, decode, encode


class BookStore(Store):
    """Gives gloo the address blobs of all peers of a group, computed on the spot.

    ``endpoints`` maps every group rank to where it listens; an empty mapping serves a group of the own rank alone, whose blob can
    then be read from ``own``. ``numbered`` is set as soon as gloo has taken its pair numbers.
    """

    def __init__(self, rank: int, endpoints: Mapping[int, Endpoint]) -> None:
        super().__init__()
        self._rank = rank
        self._endpoints = endpoints
        self._blob = b""
        self.numbered = threading.Event()

    @property
    def own(self) -> Endpoint:
        """The own address as gloo published it."""
        return decode(self._blob)

    def set(self, key: str, value: str | bytes) -> None:  # noqa: ARG002 - gloo sets one key only
        """Keep the own blob; raise ``CommsError`` when its pair numbers are not the announced ones."""
        self._blob = value.encode() if isinstance(value, str) else bytes(value)
        self.numbered.set()
        announced = self._endpoints.get(self._rank)
        if announced is not None and self.own != announced:
            raise CommsError(f"gloo gave out {self.own}, peers were told {announced}: groups must be connected in the order announced")

    def get(self, key: str) -> bytes:
        """The blob under ``key``, whose last part is the group rank."""
        rank = int(key.rsplit("/", 1)[-1])
        return self._blob if rank == self._rank else encode(self._endpoints[rank], self._rank)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Every key is there at once."""

    def has_extended_api(self) -> bool:
        """``multi_get`` is served, for GLOO_ENABLE_STORE_V2_API."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several blobs at once."""
        return [self.get(key) for key in keys]
