"""The gate: every collective of every handle passes here, is checked, counted, forwarded or looped back, and can be failed."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from instep.agent.records import Header
from instep.board import Board
from instep.errors import CommsError, Interrupted, UsageError
from instep.hooks import Communicator
from instep.torch import frames
from instep.torch.graveyard import Graveyard
from instep.torch.ops import MESSAGES, Op
from instep.torch.tape import Tape
from instep.torch.works import Arrived, FailableWork, finished

if TYPE_CHECKING:
    from instep.torch.handle import Handle
    from instep.torch.plain_handle import PlainHandle

    AnyHandle: TypeAlias = "Handle | PlainHandle"

log = logging.getLogger(__name__)
_NOTICE = 1.0
"""Seconds that a failed operation waits for the notice of its cause before it counts as a fault of its own."""

_CLOSING = 5.0
_TRANSPORT = "gloo/transport"
"""In the text of every error that comes from a connection, unlike one about the arguments of an operation."""
_ANYSOURCE = "recv_anysource"
"""The one operation that tells something beside its tensors: who sent."""


class Gate:
    """State that all handles of a process share.

    ``loopback`` is true for a replacement until it joins; ``body`` inside a commit body; ``observer`` sees every result (drills);
    ``settling`` guards what two threads may do to a work.
    """

    def __init__(self, board: Board, header: Header, tape: Tape, *, loopback: bool) -> None:
        self.board, self.header, self.tape = board, header, tape
        self.loopback = loopback
        self.connect: Callable[[AnyHandle], Communicator] = _unconnected
        self.handles: list[AnyHandle] = []
        self.proxies: set[FailableWork] = set()
        self.body = False
        self.recording = False
        self.broken = self._waits = False
        self.observer: Callable[[str, int, Sequence[Tensor]], None] | None = None
        self.point: Callable[[str], None] = lambda _name: None
        self.expects: Callable[[str], bool] = lambda _name: False
        self.settling = threading.Lock()
        self._open: deque[FailableWork] = deque()
        self._graveyard = Graveyard()
        self._collectives = 0

    def check(self) -> None:
        """Raise ``Interrupted`` when the communicators are out of date."""
        self.board.check()

    def go_live(self) -> None:
        """End the loopback of a replacement. Raises ``UsageError`` when its predecessor's set-up had made further collectives."""
        if self.loopback:
            self.tape.finish()
            self.loopback = False

    def outside_body(self, what: str) -> None:
        """Refuse ``what`` inside a commit body."""
        if self.body:
            raise UsageError(
                f"{what} inside a commit body, where only local updates may stand. Move it before `with session.commit()`; "
                "sharded optimizers need their adapter"
            )

    def issue(self, handle: "Handle", op: Op, args: Sequence[object], kwargs: dict[str, object]) -> Work:
        """Run one operation of a handle: live, alone, or from the tape of set-up results."""
        if self.body:
            by = frames.optimizer()
            self.outside_body(f"{op.name} on process group {handle.label!r}{f' by {by}' if by else ''}")
        outputs = op.outputs(args)
        handle.sequence += 1
        if self.loopback or handle.size() == 1:
            return self._alone(handle, op, args, outputs)
        self.check()
        self._collectives += 1
        self.header.put("collectives", self._collectives)
        observe = self.observer is not None and not frames.bucket_rebuild()
        self.point("issue")
        work = self.forward(handle, op, args, kwargs, outputs, observe=observe)
        self.point("collective")
        if self.expects("complete"):
            work.wait()
            self.point("complete")
        if self.recording:
            self._record(handle, op, work, outputs)
        return work

    def forward(
        self, handle: "Handle", op: Op, args: Sequence[object], kwargs: dict[str, object], outputs: list[Tensor], *, observe: bool = True
    ) -> FailableWork:
        """Hand the operation to the communicator inside the handle."""
        communicator = handle.communicator
        if communicator is None:
            raise CommsError(f"process group {handle.label!r} is not connected in incarnation {self.board.current}")
        try:
            inner: Work = getattr(communicator.group, op.name)(*args, **kwargs)
        except RuntimeError as error:
            if transport(error):
                self.failed(f"{handle.label} {op.name}", error)
            if self.board.noticed_within(0.05):
                raise Interrupted(f"{op.name} on {handle.label}") from None
            raise
        observer = self.observer if observe else None
        work = FailableWork(self, inner, op, outputs, observer=observer, label=f"{handle.label} {op.name}", sequence=handle.sequence)
        while self._open and self._open[0].ended():
            self._open.popleft()
        self._open.append(work)
        if observer is not None and op.sliced:
            work.get_future()
        return work

    def failed(self, label: str, error: RuntimeError) -> None:
        """Answer a failed operation: ``Interrupted`` if its cause becomes known soon, else ``CommsError``."""
        self.broken = True
        if self.board.noticed_within(_NOTICE):
            raise Interrupted(label) from None
        raise CommsError(f"{label}: {error}") from error

    @contextmanager
    def waiting(self, label: str, sequence: int) -> Iterator[None]:
        """Show in the record that main waits for its peers, so that it is no suspect."""
        self.header.operation(label)
        self.header.put("sequence", sequence)
        self.header.put("waiting", 1)
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.header.put("waiting", 0)

    def show_waiting(self) -> None:
        """At each beat: main may wait in C++ for a future that peers have to complete."""
        pending = next(iter(self.proxies.copy()), None)
        if pending is not None and not self._waits:
            self.header.operation(pending.label)
            self.header.put("sequence", pending.sequence)
        # Main may have begun or ended to wait meanwhile; the next beat sets that right.
        self.header.put("waiting", int(self._waits or pending is not None))

    def stale(self, incarnation: int) -> list[FailableWork]:
        """Futures of incarnations before ``incarnation`` that nobody has completed yet."""
        return [work for work in list(self.proxies) if work.incarnation < incarnation]

    def fail_proxies(self, incarnation: int) -> int:
        """Fail the futures that gloo has lost; called after the sockets were shut. The number of futures failed."""
        return sum(work.fail(CommsError(f"{work.label}: aborted by a fault")) for work in self.stale(incarnation))

    def bury(self) -> None:
        """Take the communicators out of all handles and lay them to rest until their operations have ended."""
        old = [h.communicator for h in self.handles if h.communicator is not None]
        for handle in self.handles:
            handle.communicator = None
        self.fail_proxies(self.board.target)
        works = [work for work in self._open if not work.ended()]
        self._open.clear()
        self.broken = False
        if old:
            self._graveyard.bury(old, works)

    def forget(self, handle: "AnyHandle") -> None:
        """Drop a destroyed handle."""
        if handle in self.handles:
            self.handles.remove(handle)
        if handle.communicator is not None:
            communicator, handle.communicator = handle.communicator, None
            self._graveyard.bury([communicator], [w for w in self._open if not w.ended()])

    def close(self) -> None:
        """The process is leaving and its operations have ended: drop the communicators here, in the main thread."""
        self._graveyard.close(_CLOSING)
        while self._open and self._open[0].ended():
            self._open.popleft()
        if not self._open:
            for handle in self.handles:
                handle.communicator = None

    def graves(self) -> int:
        """Communicators that still wait for an operation to end."""
        return len(self._graveyard)

    def _record(self, handle: "Handle", op: Op, work: FailableWork, outputs: list[Tensor]) -> None:
        sender = [torch.tensor(handle.rank())] if op.name == _ANYSOURCE else []
        fill = self.tape.reserve(handle.label, op.name, [*outputs, *sender])

        def arrived(_label: str, _sequence: int, _outputs: Sequence[Tensor]) -> None:
            for tensor in sender:
                tensor.fill_(work._source_rank())
            fill()

        work.follow(arrived)
        if op.name not in MESSAGES:
            work.wait()

    def _alone(self, handle: "Handle", op: Op, args: Sequence[object], outputs: list[Tensor]) -> Work:
        op.loop(args, handle.rank(), handle.size())
        sender = [torch.tensor(handle.rank())] if op.name == _ANYSOURCE else []
        if self.loopback and handle.size() > 1:
            self.tape.replay(handle.label, op.name, [*outputs, *sender])
        return Arrived(*sender) if sender else finished(outputs)


def transport(error: BaseException) -> bool:
    """Whether an error comes from a connection: the peer is the cause, most likely, not who ran into it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _TRANSPORT in str(error))


def _unconnected(handle: "AnyHandle") -> Communicator:
    raise CommsError(f"process group {handle.label!r} is made before the job is joined")
