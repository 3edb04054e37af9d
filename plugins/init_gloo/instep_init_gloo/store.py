"""The rendezvous of one group: an in-process store, filled with what peers would have written. No message leaves the process."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

from instep.errors import CommsError
from instep_init_gloo.wire import Endpoint, decode, encode


class Rendezvous:
    """Gives gloo the address blobs of all peers of a group, computed from ``endpoints`` (by group rank, the own one included).

    The store is torch's own, in C++: at 32 ranks a store in Python costs as much as a third of connecting.
    """

    def __init__(self, rank: int, endpoints: Mapping[int, Endpoint], prefix: str) -> None:
        """Fill the store; ``prefix`` is what gloo puts before the rank in its keys."""
        self.store = HashStore()
        self._announced = endpoints[rank]
        self._key = f"{prefix}{rank}"
        for peer, endpoint in endpoints.items():
            if peer != rank:
                self.store.set(f"{prefix}{peer}", encode(endpoint, rank))  # type: ignore[arg-type]

    def written(self) -> bool:
        """Whether gloo has written its own blob, which it does once its pair numbers are taken."""
        return bool(self.store.check([self._key]))

    def verify(self) -> None:
        """Raise ``CommsError`` when gloo took other pair numbers than the announced ones."""
        if self.written() and (own := decode(self.store.get(self._key))) != self._announced:
            raise CommsError(f"gloo gave out {own}, peers were told {self._announced}: groups must be connected in the order announced")


class Probe(Store):
    """The rendezvous of a group of one, which shows what gloo writes and under which key."""

    def __init__(self) -> None:
        super().__init__()
        self._key, self._blob = "", b""

    @property
    def own(self) -> Endpoint:
        """Where the device listens, and the number that the probe took."""
        return decode(self._blob)

    @property
    def prefix(self) -> str:
        """What gloo puts before the rank in its keys."""
        return self._key[: self._key.rindex("/") + 1]

    def set(self, key: str, value: str | bytes) -> None:
        """Keep key and blob."""
        self._key, self._blob = key, value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:  # noqa: ARG002 - there is one key only
        """The own blob."""
        return self._blob

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """The own key is there at once."""

    def has_extended_api(self) -> bool:
        """``multi_get`` is served, for GLOO_ENABLE_STORE_V2_API."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several blobs at once."""
        return [self._blob for _ in keys]
