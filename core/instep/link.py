"""The link to the agent: one inherited socket, one control thread that reads it and shows that the process is alive."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from instep.agent.remains import end_own_group
from instep.messages import Decoder, Message, encode

log = logging.getLogger(__name__)
_BEAT = 0.1
_LAST = 0.3
"""Seconds that a rank without an agent waits for its children's end, to remove what they left."""


class Link:
    """Sends from any thread, receives in the control thread. When the agent is gone, the process and its children end at once."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, on_message: Callable[[Message], None], on_beat: Callable[[], None]) -> None:
        """Start the control thread. ``on_beat`` runs about ten times a second."""
        self._thread = threading.Thread(target=self._run, args=(on_message, on_beat), name="instep-control", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send one message; a lost agent ends the process instead."""
        try:
            with self._sending:
                self._sock.sendall(encode(message))
        except OSError:
            self._orphaned()

    def close(self) -> None:
        """Stop the control thread, keep the process."""
        self._closed = True
        self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(1.0)
        self._sock.close()

    def _run(self, on_message: Callable[[Message], None], on_beat: Callable[[], None]) -> None:
        decoder = Decoder()
        next_beat = time.monotonic()
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        while not self._closed:
            if poll.poll(_BEAT * 1000):
                try:
                    data = self._sock.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    break
                for message in decoder.feed(data):
                    on_message(message)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT
                on_beat()
        if not self._closed:
            self._orphaned()

    def _orphaned(self) -> None:
        """The agent is gone: end this process and every process it started."""
        if self._closed:
            return
        if os.getpgrp() == os.getpid():
            end_own_group(_LAST)
        os._exit(70)
