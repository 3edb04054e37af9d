"""``init_gloo``: gloo communicators from the address book, with no store, no server and no message."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PrivateAttr

from instep.errors import InstepError
from instep.hooks import CommsRequest, Communicator, Interruption, Job, Plugin, hookimpl
from instep.model import AddressBook, Group, Json
from instep_init_gloo.sockets import Name, shut_down

if TYPE_CHECKING:
    from instep_init_gloo.device import Device

NAME = "init_gloo"
BACKEND = "gloo"


class InitGloo(Plugin):
    """One gloo device for the life of the process; every group is connected from numbers that its members announced."""

    HOOK_API: ClassVar[int] = 1

    interface: str | None = Field(default=None, description="network interface to listen on; none: the job's host address")
    connect_timeout: float = Field(default=3.0, gt=0, description="seconds that connecting one group may take")
    operation_timeout: float = Field(default=1800.0, gt=0, description="seconds that one collective may take")
    threads: int = Field(default=2, ge=1, description="worker threads of each group")

    _device: "Device | None" = PrivateAttr(default=None)
    _incarnation: int = PrivateAttr(default=-1)
    _peers: frozenset[Name] = PrivateAttr(default=frozenset())

    @hookimpl
    def start(self, job: Job) -> Mapping[str, int]:
        """Open the device."""
        from instep_init_gloo.device import Device

        self._device = Device(host=job.host, interface=self.interface)
        return {BACKEND: self._device.port}

    @hookimpl
    def announce(self, groups: Sequence[Group]) -> Mapping[str, Json]:
        """The pair number that each group begins with on this rank, and the address of the device."""
        device = self._opened()
        first = device.unused().first
        pairs: dict[str, Json] = {}
        for group in groups:
            if group.backend == BACKEND:
                pairs[group.name] = first
                first += len(group.ranks)
        device.promise(first)
        return {"host": device.host, "pairs": pairs}

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        """Shut every gloo connection, so that operations that wait for a dead or silent peer fail at once."""
        if self._device is not None and interruption.incarnation > self._incarnation:
            shut_down((self._device.host, self._device.port), self._peers)

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        """Connect the groups in the order in which they were announced."""
        if request.backend != BACKEND:
            return None
        from instep_init_gloo.connect import Connecting, Limits, endpoints

        device = self._opened()
        self._incarnation = request.incarnation
        self._peers |= _names(request.book)
        limits = Limits(self.connect_timeout, self.operation_timeout, self.threads)
        groups = [(group, endpoints(group, request.book, NAME)) for group in request.groups]
        connecting = Connecting(device, rank=request.rank, book=request.book, limits=limits, groups=groups)
        connecting.start()
        made = connecting.result(request.check)
        self._peers = _names(request.book)
        return made

    @hookimpl
    def close(self) -> None:
        """Let go of the device; it ends with the last group."""
        self._device = None

    def _opened(self) -> "Device":
        if self._device is None:
            raise InstepError(f"{NAME}: start was not called; groups can be made after instep.init()")
        return self._device


def _names(book: AddressBook) -> frozenset[Name]:
    notes = [book.notes[a.rank].get(NAME) if a.rank < len(book.notes) else None for a in book.addresses]
    hosts = [note.get("host") if isinstance(note, dict) else None for note in notes]
    return frozenset(
        (host if isinstance(host, str) else address.host, address.ports[BACKEND])
        for host, address in zip(hosts, book.addresses, strict=True)
        if BACKEND in address.ports
    )
