"""One thread that moves many sockets: each connection is a generator that yields whenever it would block.

Connections begin as strangers. Whatever a stranger does, and however slowly, ends with its connection dropped and nothing else; an
error of a peer that has proved itself ends the transfer.
"""

import logging
import selectors
import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress

from instep.errors import CommsError, InstepError
from instep_state_replica.sockets import Sockets

log = logging.getLogger(__name__)
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Steps = Generator[int, None, None]
"""Yields ``READ`` or ``WRITE``: what its socket must be ready for before it goes on."""

_POLL = 0.02
_STRANGER = 2.0
"""Seconds in which a stranger must prove itself."""
_STRANGERS = 128
_NOTICE = 0.2
"""Seconds in which the notice of a peer's death may follow the loss of its connection."""


class Refused(Exception):  # noqa: N818 - an outcome of a greeting
    """The other side is not the peer that was expected."""


class Task:
    """One connection. ``peer`` names the other side in messages; ``expires`` is a monotonic time in seconds."""

    def __init__(self, sock: socket.socket, *, peer: str, trusted: bool, expires: float | None) -> None:
        self.sock, self.peer, self.trusted, self.expires = sock, peer, trusted, expires
        self.steps: Steps | None = None

    def trust(self, peer: str) -> None:
        """The other side has proved who it is."""
        self.peer, self.trusted, self.expires = peer, True, None


class Loop:
    """Runs connections until a condition holds. ``check`` may raise at any time; ``deadline`` is a monotonic time in seconds."""

    def __init__(self, check: Callable[[], None], deadline: float, sockets: Sockets) -> None:
        self._check, self._deadline, self._sockets = check, deadline, sockets
        self._selector = selectors.DefaultSelector()
        self._tasks: list[Task] = []

    def add(self, task: Task, steps: Steps) -> None:
        """Run a connection to the end of its steps, then close it."""
        task.steps = steps
        task.sock.setblocking(False)
        self._sockets.add(task.sock)
        self._tasks.append(task)
        self._selector.register(task.sock, WRITE, task)

    def listen(self, listener: socket.socket, serve: Callable[[Task], Steps]) -> None:
        """Accept connections, each of them a stranger served by ``serve``."""
        listener.setblocking(False)
        self._selector.register(listener, READ, lambda: self._accept(listener, serve))

    def run(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Move all connections until ``done``.

        Raises:
            CommsError: a peer's connection was lost, or could not be made in time.
            InstepError: the deadline passed; ``what`` says what was waited for.
        """
        while not done():
            self._check()
            now = time.monotonic()
            if now > self._deadline:
                peers = ", ".join(task.peer for task in self._tasks if task.trusted) or "connections"
                raise InstepError(f"{what()}: the deadline passed while waiting for {peers}")
            self._expire(now)
            for key, _ in self._selector.select(_POLL):
                if isinstance(key.data, Task):
                    self._advance(key.data)
                else:
                    key.data()

    def close(self) -> None:
        """Close every connection; listeners stay open."""
        for task in list(self._tasks):
            self._drop(task)
        self._selector.close()

    def _advance(self, task: Task) -> None:
        if task.steps is None or task not in self._tasks:
            return
        try:
            self._selector.modify(task.sock, next(task.steps), task)
        except StopIteration:
            self._drop(task)
        except (OSError, Refused) as error:
            self._failed(task, error)

    def _failed(self, task: Task, error: Exception) -> None:
        self._drop(task)
        if not task.trusted:
            log.info("dropped a connection from %s: %s", task.peer, error)
            return
        until = time.monotonic() + _NOTICE
        while time.monotonic() < until:
            self._check()
            time.sleep(0.01)
        raise CommsError(f"transfer of state with {task.peer} failed: {error}") from error

    def _expire(self, now: float) -> None:
        for task in [t for t in self._tasks if t.expires is not None and now > t.expires]:
            self._failed(task, TimeoutError("no answer in time"))

    def _accept(self, listener: socket.socket, serve: Callable[[Task], Steps]) -> None:
        try:
            sock, address = listener.accept()
        except OSError:
            # Gone between readiness and accept, or out of descriptors: the next round tries again.
            return
        strangers = [task for task in self._tasks if not task.trusted]
        if len(strangers) >= _STRANGERS:
            self._failed(strangers[0], ConnectionError("too many strangers"))
        task = Task(sock, peer=f"{address[0]}:{address[1]}", trusted=False, expires=time.monotonic() + _STRANGER)
        self.add(task, serve(task))

    def _drop(self, task: Task) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
            self._selector.unregister(task.sock)
            self._sockets.discard(task.sock)
            if task.steps is not None:
                with suppress(OSError, ValueError):
                    task.steps.close()
            task.sock.close()
