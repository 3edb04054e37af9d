"""``BookStore``: the store that a ``ProcessGroupNCCL`` is given. It computes ids from the address book; nothing is asked of a server.

Keys were verified against torch 2.14.1 (see docs/reference/nccl.md). With as many roots as ranks every id is computed, the own one too. Ids
that NCCL has made itself (a single root, a pair, few roots for many ranks) are fetched from the desk of the rank that made them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from instep.errors import CommsError
from instep_init_nccl.bootstrap import first_of, retire
from instep_init_nccl.ids import UniqueId
from instep_init_nccl.keys import Root, parse
from instep_init_nccl.mini_root import MiniRoot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A rank's place in a group of one incarnation, and where the mini root of each member listens, in group order."""

    incarnation: int
    group: str
    rank: int
    roots: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.roots)


class BookStore(Store):
    """Answers one ``ProcessGroupNCCL`` of one incarnation.

    ``head`` is the length of the NCCL version's hello, ``seconds`` how long a peer's own id may take, ``check`` may raise meanwhile.
    """

    def __init__(self, root: MiniRoot, place: Place, *, head: int, seconds: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._root, self._place, self._head, self._seconds, self._check = root, place, head, seconds, check
        self._own: dict[str, bytes] = {}
        self._told: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._communicators = 0

    def set(self, key: str, value: str | bytes) -> None:
        """Keep an own id, and tell it to peers who ask."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._own[key] = raw
        if parse(key) is not None:
            self._root.publish(self._place.incarnation, self._name(key, self._told), raw)

    def get(self, key: str) -> bytes:
        """One id. Raises ``CommsError`` for a key that is about none, and when its owner does not answer."""
        asked = parse(key)
        if isinstance(asked, Root):
            return self.multi_get([key])[0]
        if asked is None or asked.owner == self._place.rank:
            if key not in self._own:
                raise CommsError(f"torch asks its store for {key!r}, which init_nccl does not know; see docs/reference/nccl.md")
            return self._own[key]
        return self._fetch(key, asked.owner)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The ids of all roots of a communicator: computed if there is one for each rank, else each from the rank that made it."""
        asked = [parse(key) for key in keys]
        roots = [one for one in asked if isinstance(one, Root)]
        if len(roots) != len(keys):
            return [self.get(key) for key in keys]
        if len(roots) == self._place.size:
            return self._computed(keys, roots)
        owners = [first_of(root.index, self._place.size, len(roots)) for root in roots]
        return [self._own[k] if owner == self._place.rank else self._fetch(k, owner) for k, owner in zip(keys, owners, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether this rank has set these keys; torch's monitor asks for signals that nobody gives."""
        return all(key in self._own for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Answers come with ``get``, which waits."""

    def has_extended_api(self) -> bool:
        """``multi_get`` is served."""
        return True

    def clone(self) -> "BookStore":
        """The same store: it has no connection of its own."""
        return self

    def _computed(self, keys: Sequence[str], roots: Sequence[Root]) -> list[bytes]:
        place = self._place
        magic = self._root.expect(place.incarnation, place.group, f"roots/{self._communicators}")
        self._communicators += 1
        for key in keys:
            # The real root behind the id that torch made is not wanted: without this its thread and socket would stay.
            if (idle := self._own.pop(key, None)) is not None:
                retire(UniqueId.decode(idle), head=self._head)
        return [UniqueId(magic, *place.roots[root.index]).encode() for root in roots]

    def _fetch(self, key: str, owner: int) -> bytes:
        place = self._place
        deadline = time.monotonic() + self._seconds
        try:
            return self._root.fetch(
                place.roots[owner], place.incarnation, self._name(key, self._asked), deadline=deadline, check=self._check
            )
        except CommsError as error:
            raise CommsError(f"the NCCL id {key!r} of group rank {owner} in group {place.group!r} did not come: {error}") from None

    def _name(self, key: str, counter: "Counter[str]") -> str:
        """The name at the desk: a communicator that is made again gets another one."""
        counter[key] += 1
        return f"{self._place.group}/{key.rpartition('/')[2]}/{counter[key]}"
