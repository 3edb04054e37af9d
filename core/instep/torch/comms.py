"""Process groups of this rank: what peers must know to connect them, and connecting them through the comms plugins."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from instep.board import Board
from instep.errors import InstepError, PluginError
from instep.hooks import CommsRequest, Communicator
from instep.messages import Gather
from instep.model import AddressBook, Group, Json
from instep.plugins import LoadedPlugins
from instep.torch.gate import Gate
from instep.torch.handle import Handle
from instep.torch.ops import OPS
from instep.torch.plain_handle import PlainHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from instep.messages import Message
    from instep.torch.gate import AnyHandle


class Comms:
    """Connects handles: from the first book, after asking the members of a new group, or from the book of a plan."""

    def __init__(
        self, board: Board, gate: Gate, plugins: LoadedPlugins, *, rank: int, world_size: int, tell: "Callable[[Message], None]"
    ) -> None:
        self._board, self._gate, self._plugins, self._tell = board, gate, plugins, tell
        self._rank, self._world_size = rank, world_size
        self.book: AddressBook | None = None
        gate.connect = self.connect

    def among(self, handles: "Sequence[AnyHandle]") -> tuple[Group, ...]:
        """The groups of those handles that are to be connected, in the order in which they were made."""
        return tuple(h.group for h in handles if h.connects)

    def announce(self, groups: Sequence[Group]) -> dict[str, Json]:
        """What peers must know to connect these groups, by plugin."""
        answers = [(plugin, run()) for plugin, run in self._plugins.each("announce", groups=groups)]
        return {plugin: dict(notes) for plugin, notes in answers if isinstance(notes, Mapping)}

    def connect(self, handle: "AnyHandle") -> Communicator:
        """Connect one group while the job is live."""
        group, book = handle.group, self.book
        if book is None:
            raise InstepError(f"process group {group.name!r} is made before the first address book")
        if len(self._gate.handles) > 1:
            book = self._gathered(group, book)
        request = self._request(group.backend, [group], book)
        return self.made(request, self._plugins.first("reinit_comms", request=request))[0]

    def requests(self, book: AddressBook) -> Sequence[CommsRequest]:
        """All groups, one request a backend, from the book of a plan."""
        self.book = book
        groups = self.among(self._gate.handles)
        return [self._request(b, [g for g in groups if g.backend == b], book) for b in dict.fromkeys(g.backend for g in groups)]

    def made(self, request: CommsRequest, answer: tuple[str, object] | None) -> Sequence[Communicator]:
        """The communicators in a plugin's answer. Raises ``PluginError`` when nobody answered, or not as asked."""
        if answer is None:
            raise PluginError(
                f"no enabled plugin connects backend {request.backend!r}: pip install 'instep[init-{request.backend}]' and set "
                f"plugins.init_{request.backend} = true"
            )
        plugin, communicators = answer
        if not isinstance(communicators, Sequence) or len(communicators) != len(request.groups):
            raise PluginError(
                f"plugin {plugin!r}: reinit_comms must return {len(request.groups)} communicators, it returned {communicators!r}"
            )
        return communicators

    def install(self, request: CommsRequest, communicators: Sequence[Communicator]) -> None:
        """Put new communicators into their handles."""
        made = dict(zip((g.name for g in request.groups), communicators, strict=True))
        for handle in self._gate.handles:
            if handle.label in made:
                handle.communicator = made[handle.label]

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather byte strings of equal length over the world."""
        if self._world_size == 1:
            return [data]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self._world_size)]
        control = self._gate.handles[0]
        assert isinstance(control, Handle)
        self._gate.forward(control, OPS["allgather"], ([rows], [own]), {}, rows, observe=False).wait()
        return [bytes(row.tolist()) for row in rows]

    def _request(self, backend: str, groups: Sequence[Group], book: AddressBook) -> CommsRequest:
        names = {group.name for group in groups}
        return CommsRequest(
            backend=backend,
            rank=self._rank,
            incarnation=book.incarnation,
            groups=groups,
            book=book,
            check=self._board.checker(book.incarnation),
            options={h.label: h.options for h in self._gate.handles if isinstance(h, PlainHandle) and h.label in names},
        )

    def _gathered(self, group: Group, book: AddressBook) -> AddressBook:
        incarnation = self._board.current
        key = f"{incarnation}/{group.name}"
        self._tell(Gather(incarnation=incarnation, key=key, members=group.ranks, rank=self._rank, notes=self.announce([group])))
        with self._gate.waiting(f"new group {group.name}", 0):
            self._board.wait(lambda b: key in b.gathered, what=f"the members of group {group.name}", check=self._gate.check)
        rows = dict(zip(group.ranks, self._board.gathered.pop(key).notes, strict=True))
        notes = tuple(rows.get(rank, {}) for rank in range(self._world_size))
        return AddressBook(incarnation=incarnation, addresses=book.addresses, notes=notes)
