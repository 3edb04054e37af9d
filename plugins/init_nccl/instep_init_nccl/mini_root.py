"""``MiniRoot``: one rank's own NCCL root, for the life of the process, where every peer can compute it to be. Imports no torch.

NCCL accepts as many roots as there are ranks (``ncclCommInitRankScalable``, 2.23). Then a root serves one rank: two messages in, one
out, whatever the number of ranks, and no rank has to be asked for an id. The same socket is the desk for ids that NCCL makes itself.
"""

import logging
import socket
import threading
from collections.abc import Callable

from instep.errors import CommsError, InstepError
from instep_init_nccl import desk
from instep_init_nccl.bootstrap import TYPE, send
from instep_init_nccl.ids import UniqueId, magic_of
from instep_init_nccl.listener import Listener, Message, answer, hang_up
from instep_init_nccl.meetings import Answer, Meetings

log = logging.getLogger(__name__)
_ANSWERING = 5.0


class MiniRoot:
    """Listens on ``host``, a numeric address; ``port`` 0 takes a free one. One thread, which ends with ``close``.

    Raises ``CommsError`` when the port cannot be had.
    """

    def __init__(self, *, secret: bytes, host: str, port: int = 0) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._meetings, self._desk = Meetings(), desk.Desk(secret)
        self._listener = Listener(host, port, heard=self._heard, gone=self._gone)
        self.host, self.port = self._listener.host, self._listener.port

    @property
    def dropped(self) -> int:
        """Messages that were of no use: older incarnations, strangers, nonsense."""
        return self._meetings.dropped

    @property
    def served(self) -> int:
        """Answers given to the own rank."""
        return self._meetings.served

    def expect(self, incarnation: int, group: str, communicator: str) -> int:
        """The own rank is about to join a communicator; its magic."""
        magic = magic_of(self._secret, incarnation, group, communicator)
        with self._lock:
            self._meetings.expect(magic)
        return magic

    def publish(self, incarnation: int, name: str, value: bytes) -> None:
        """Tell peers a value under a name."""
        with self._lock:
            waiting = self._desk.put(incarnation, name, value)
        for connection, data in waiting:
            answer(connection, data)

    def fetch(self, peer: tuple[str, int], incarnation: int, name: str, *, deadline: float, check: Callable[[], None]) -> bytes:
        """What the mini root at ``peer`` publishes under a name. ``deadline`` is a monotonic time, ``check`` may raise.

        Raises ``CommsError`` when there is no answer in time.
        """
        return desk.fetch(peer, desk.request(self._secret, incarnation, name), deadline=deadline, check=check)

    def advance(self, incarnation: int) -> None:
        """Drop what is older than ``incarnation``, and make an own rank that still waits for such a neighbour give up."""
        with self._lock:
            answers = self._meetings.advance(incarnation)
            over = self._desk.advance(incarnation)
        for connection in over:
            hang_up(connection)
        for one in answers:
            _tell(one)

    def give_up(self) -> None:
        """Make an own rank that waits for a neighbour give up; what it was about to join is forgotten."""
        with self._lock:
            answers = self._meetings.give_up()
        for one in answers:
            _tell(one)

    def close(self) -> None:
        """Stop listening, and end the thread."""
        self._listener.close()

    def _heard(self, message: Message, connection: socket.socket) -> bool:
        try:
            if (message.word, message.kind) == (desk.MAGIC, desk.TYPE):
                with self._lock:
                    data = self._desk.ask(message.payload, connection)
                if data is not None:
                    answer(connection, data)
                return data is None
            if message.kind != TYPE:
                raise CommsError(f"a connection of kind {message.kind}")
            with self._lock:
                reply = self._meetings.hear(message.word, message.payload)
        except (InstepError, ValueError, KeyError, TypeError) as error:
            log.debug("dropped a message: %s", error)
            with self._lock:
                self._meetings.drop()
            return False
        if reply is not None:
            _tell(reply)
        return False

    def _gone(self, connection: socket.socket) -> None:
        with self._lock:
            self._desk.forget(connection)


def unique_ids(secret: bytes, incarnation: int, group: str, communicator: str, roots: list[tuple[str, int]]) -> list[bytes]:
    """The ids of a communicator whose ranks have their roots at these addresses: one each, in rank order."""
    magic = magic_of(secret, incarnation, group, communicator)
    return [UniqueId(magic, host, port).encode() for host, port in roots]


def _tell(reply: Answer) -> None:
    try:
        send(reply.address, reply.data, seconds=_ANSWERING)
    except OSError as error:
        log.warning("the own rank does not wait for its NCCL neighbour any more at %s:%d: %s", *reply.address, error)
