"""A plugin that connects groups of backend nccl with gloo: plain handles and all of their recovery, on a machine without a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from instep.hooks import CommsRequest, Communicator, Interruption, Job, Plugin, hookimpl
from instep.model import AddressBook, Group, Json
from instep_init_gloo.plugin import InitGloo

NAME = "nccl_on_cpu"


class NcclOnCpu(Plugin):
    """``init_gloo`` under another name and for another backend."""

    HOOK_API: ClassVar[int] = 1

    _inner: InitGloo = PrivateAttr(default_factory=lambda: InitGloo(connect_timeout=3.0, operation_timeout=5.0))

    @hookimpl
    def start(self, job: Job) -> Mapping[str, int]:
        return {NAME: self._inner.start(job)["gloo"]}

    @hookimpl
    def announce(self, groups: Sequence[Group]) -> Mapping[str, Json] | None:
        wanted = [_as_gloo(group) for group in groups if group.backend == "nccl"]
        return self._inner.announce(wanted) if wanted else None

    @hookimpl
    def quiesce(self, interruption: Interruption) -> None:
        self._inner.quiesce(interruption)

    @hookimpl
    def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator] | None:
        if request.backend != "nccl":
            return None
        assert all(group.name in request.options for group in request.groups)
        book = request.book
        addresses = tuple(a.model_copy(update={"ports": {"gloo": a.ports[NAME]}}) for a in book.addresses)
        notes = tuple({"init_gloo": note[NAME]} if NAME in note else {} for note in book.notes)
        as_gloo = AddressBook(incarnation=book.incarnation, addresses=addresses, notes=notes)
        groups = [_as_gloo(group) for group in request.groups]
        return self._inner.reinit_comms(replace(request, backend="gloo", groups=groups, book=as_gloo))

    @hookimpl
    def close(self) -> None:
        self._inner.close()


def install(folder: Path) -> None:
    """Make it a distribution that a path leads to."""
    info = folder / "nccl_on_cpu-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-on-cpu\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[instep]\n{NAME} = {NAME}:NcclOnCpu\n")
    (folder / f"{NAME}.py").write_text(Path(__file__).read_text())


def _as_gloo(group: Group) -> Group:
    return group.model_copy(update={"backend": "gloo"})
