"""A worker as the agent holds it: one process by pidfd, its channel, and the record that outlives it."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

from instep.agent import records
from instep.agent.procfs import vitals
from instep.agent.records import Header, Progress, State
from instep.agent.watchdog import Vitals, movement
from instep.messages import Decoder, Message, encode

_CHUNK = 1 << 18


class Memory:
    """What a rank keeps over all its births: the record, and the results of its set-up collectives. Both are nameless memory files."""

    def __init__(self, rank: int) -> None:
        self.record = records.create(f"instep-record-{rank}")
        self.setup = os.memfd_create(f"instep-setup-{rank}", os.MFD_CLOEXEC)
        self._header = Header(self.record)
        self._header.put("joined", -1)
        self._last = records.read(self.record)
        self._vitals = Vitals()

    def progress(self) -> Progress:
        """The present progress words."""
        return records.read(self.record)

    def new_birth(self) -> None:
        """The predecessor is dead: its progress stays, but nobody stands where it stood."""
        self._header.put("state", State.BORN)
        self._header.put("waiting", 0)
        self._header.operation("")

    def vitals(self, pid: int, progress: Progress) -> Vitals:
        """What /proc tells; asked only while the progress words do not move, since they tell enough otherwise."""
        still = movement(progress) == movement(self._last)
        self._vitals = vitals(pid) if still else replace(self._vitals, stopped=False)
        self._last = progress
        return self._vitals

    def close(self) -> None:
        """Give the memory back."""
        self._header.close()
        os.close(self.record)
        os.close(self.setup)


class Line:
    """The agent's end of a worker's socket pair; never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_messages: Callable[[list[Message]], None]) -> None:
        self._loop, self._on_messages = loop, on_messages
        self._sock, self.theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._decoder = Decoder()
        self._waiting = bytearray()
        loop.add_reader(self._sock, self.drain)

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as the worker reads; one that is dead hears nothing."""
        if self._sock.fileno() >= 0:
            self._waiting += encode(message)
            self._flush()

    def drain(self) -> None:
        """Handle everything that the worker has sent so far."""
        messages: list[Message] = []
        while self._sock.fileno() >= 0:
            try:
                data = self._sock.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._sock)
                break
            messages += self._decoder.feed(data)
        if messages:
            self._on_messages(messages)

    def close(self) -> None:
        """Close both ends."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()
        self.theirs.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._sock.send(self._waiting)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._waiting.clear()
        self._loop.remove_writer(self._sock)


class Worker:
    """One birth of a rank. ``pid`` is 0 until the process exists; ``dead`` once it certainly does not any more."""

    def __init__(self, rank: int, birth: int, line: Line) -> None:
        self.rank, self.birth, self.line = rank, birth, line
        self.pid = 0
        self.dead = False
        self.fallen = 0
        self.doomed: str | None = None
        self._pidfd = -1

    def born(self, pid: int, pidfd: int) -> None:
        """The process exists; ``pidfd`` now belongs to this object."""
        self.pid, self._pidfd = pid, pidfd
        self.line.theirs.close()
        if self.doomed is not None:
            self.signal(signal.SIGKILL)

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["Worker"], None]) -> None:
        """Call back once when the process has exited."""

        def exited() -> None:
            loop.remove_reader(self._pidfd)
            on_exit(self)

        loop.add_reader(self._pidfd, exited)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to this very process, never to another one that took its number."""
        if self.pid and not self.dead:
            try:
                signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                return

    def kill(self, why: str) -> None:
        """Kill the process, also when it is only about to be born."""
        self.doomed = self.doomed or why
        self.signal(signal.SIGKILL)

    def buried(self, loop: asyncio.AbstractEventLoop) -> None:
        """The process is dead: give its channel and pidfd back."""
        self.dead = True
        self.line.close()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
