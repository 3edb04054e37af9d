"""The thread that takes copies behind a commit, and sends to the buddy what no other rank holds."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from instep.errors import CommsError, InstepError
from instep.model import AddressBook
from instep_state_replica import buddy_wire, wire
from instep_state_replica.copies import Copy, Look, Shelf, Spares, capture
from instep_state_replica.reactor import Refused
from instep_state_replica.sockets import Sockets, dial

PORT = "buddy"
_STOP = 30.0
"""Seconds in which the thread must notice that its work is out of date."""


class _Stale(Exception):  # noqa: N818 - no error
    """A newer incarnation has begun."""


@dataclass(frozen=True)
class Task:
    """Copy these shard groups of ``step``; the buddy is found in ``book``."""

    step: int
    book: AddressBook
    looks: Sequence[Look]


class Sender:
    """``shelf`` holds this rank's own copies, ``sent`` counts the bytes that went to the buddy, ``seconds`` is what the last step's took.

    ``connect``: seconds in which a connection must stand.
    """

    def __init__(self, *, rank: int, secret: bytes, connect: float) -> None:
        self.shelf = Shelf()
        self.sent, self.seconds = 0, 0.0
        self._rank, self._secret, self._connect = rank, secret, connect
        self._changed = threading.Condition()
        self._task: Task | None = None
        self._busy = self._done = self._closed = False
        self._error: Exception | None = None
        self._incarnation = 0
        self._buddy = rank
        self._sockets = Sockets()
        self._socket: tuple[int, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def give(self, task: Task, buddy: int) -> None:
        """Start with the copies of a step; those of the step before are done."""
        with self._changed:
            self._task, self._buddy, self._done, self._error = task, buddy, False, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="instep-copies", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settled(self, seconds: float) -> bool:
        """Whether the copies of the last task are complete, here and at the buddy; waits up to ``seconds``. Raises what went wrong."""
        if not self._done and seconds > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._done or self._error is not None, seconds)
        if self._error is not None:
            raise self._error
        return self._done

    def idle(self) -> None:
        """Wait until nothing is copied any more, once a newer incarnation has begun. Raises ``InstepError`` when that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy and (self._task is None or self._out_of_date(self._task)), _STOP):
                raise InstepError(f"the copies of rank {self._rank} are still being taken {_STOP:.0f} s after a fault")

    def quiesce(self, incarnation: int) -> None:
        """Stop what belongs to older incarnations. Callable from any thread."""
        with self._changed:
            self._incarnation = max(self._incarnation, incarnation)
        self._sockets.shut_older(incarnation)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sockets.shut_older(1 << 62)
        if self._thread is not None:
            self._thread.join(_STOP)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            error, began = None, time.monotonic()
            try:
                self._work(task)
            except _Stale:
                pass
            except Exception as raised:  # noqa: BLE001 - main raises it before its next barrier
                error = raised
            with self._changed:
                if self._task is None and not self._out_of_date(task):
                    self.seconds = time.monotonic() - began
                    self._done, self._error = error is None, self._named(task, error)
                self._busy = False
                self._changed.notify_all()
        self._hang_up()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._task is not None or self._closed)
            task, self._task = self._task, None
            self._busy = not self._closed
            return None if self._closed else task

    def _work(self, task: Task) -> None:
        go_on = partial(self._go_on, task)
        copies: list[Copy] = []
        for look in task.looks:
            go_on()
            before, spare = self.shelf.begin(look.name, task.step)
            copy = capture(look, task.step, before, Spares(spare), go_on)
            self.shelf.put(copy)
            copies.append(copy)
        for copy in copies:
            if copy.replicas == (self._rank,):
                go_on()
                self._send(task, copy)

    def _send(self, task: Task, copy: Copy) -> None:
        try:
            sock = self._connected(task)
            offer = buddy_wire.Offer.of(copy)
            buddy_wire.send(sock, offer.pack())
            wanted = buddy_wire.word(sock, len(copy.parts))
            for part, flag in zip(copy.parts, wanted, strict=True):
                if flag:
                    buddy_wire.send(sock, part.bytes.data)
                    self.sent += len(part.bytes)
            if buddy_wire.word(sock, 1) != wire.ACK:
                raise InstepError("it arrived damaged (digests differ), or the state changed outside of a commit while it was copied")
        except BaseException:
            self._hang_up()
            raise

    def _connected(self, task: Task) -> socket.socket:
        if self._socket is not None and self._socket[0] == task.book.incarnation:
            return self._socket[1]
        self._hang_up()
        address = task.book.addresses[self._buddy]
        if PORT not in address.ports:
            raise InstepError(f"rank {self._buddy} announced no port {PORT!r}; plugins.state_replica.buddies must be set on every rank")
        sock = dial(address.host, address.ports[PORT])
        self._socket = task.book.incarnation, sock
        self._sockets.begin(task.book.incarnation)
        self._sockets.add(sock)
        until = time.monotonic() + self._connect
        greeting = wire.Greeting(self._secret, task.book.incarnation, self._rank, self._buddy)
        go_on = partial(self._go_on, task)
        go_on()
        buddy_wire.greeted(sock, wire.connected(sock), until=until, go_on=go_on)
        buddy_wire.greeted(sock, wire.greet(sock, greeting), until=until, go_on=go_on)
        return sock

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._sockets.discard(self._socket[1])
            self._socket[1].close()
            self._socket = None

    def _go_on(self, task: Task) -> None:
        if self._out_of_date(task) or self._closed:
            raise _Stale

    def _out_of_date(self, task: Task) -> bool:
        return task.book.incarnation < self._incarnation

    def _named(self, task: Task, error: Exception | None) -> Exception | None:
        if error is None:
            return None
        text = f"the copy of step {task.step} of rank {self._rank} at its buddy, rank {self._buddy}: {type(error).__name__}: {error}"
        lost = isinstance(error, OSError | Refused)
        return CommsError(text) if lost else InstepError(text)
