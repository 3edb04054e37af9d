"""What a rank keeps for those whose buddy it is: a listener, a thread for each connection, copies of two steps."""

import logging
import socket
import threading
import time
from contextlib import suppress

from instep.errors import InstepError
from instep_state_replica import buddy_wire, wire
from instep_state_replica.copies import Arrangement, Copy, Part, Shelf, Spares
from instep_state_replica.reactor import Refused, Steps
from instep_state_replica.sockets import Sockets, listen

log = logging.getLogger(__name__)
_STRANGER = 2.0
"""Seconds in which a stranger must prove itself."""
_THREADS = 64


class Receiver:
    """Listens on ``host``; ``port`` is the system's choice."""

    def __init__(self, *, rank: int, secret: bytes, host: str) -> None:
        self._shelf = Shelf()
        self._rank, self._secret = rank, secret
        self._lock = threading.Lock()
        self._incarnation = 0
        self._sockets = Sockets()
        self._sockets.begin(0)
        self._listener = listen(host)
        self.port = int(self._listener.getsockname()[1])
        self._room = threading.BoundedSemaphore(_THREADS)
        self._acceptor = threading.Thread(target=self._accept, name="instep-buddy", daemon=True)
        self._acceptor.start()

    def steps(self) -> dict[str, tuple[int, ...]]:
        """Steps with a complete copy, by shard group."""
        with self._lock:
            return dict(self._shelf.steps())

    def get(self, name: str, step: int) -> Copy | None:
        """A complete copy."""
        with self._lock:
            return self._shelf.get(name, step)

    def drop(self, name: str, step: int) -> None:
        """A copy is damaged."""
        with self._lock:
            self._shelf.drop(name, step)

    def bytes(self) -> int:
        """Host memory in use."""
        with self._lock:
            return self._shelf.bytes()

    def quiesce(self, incarnation: int) -> None:
        """From now on nothing of an older incarnation changes a copy. Callable from any thread."""
        with self._lock:
            self._incarnation = max(self._incarnation, incarnation)
        self._sockets.shut_older(incarnation)
        self._sockets.begin(self._incarnation)

    def close(self) -> None:
        """End all threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.quiesce(1 << 62)
        self._acceptor.join(_STRANGER)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or self._incarnation >= 1 << 62:
                    return
                time.sleep(0.01)  # out of descriptors: until there are some again
                continue
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="instep-buddy-in", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        incarnation, who = self._incarnation, "a stranger"
        self._sockets.add(sock)
        try:
            source = self._greet(sock, incarnation)
            who = f"rank {source}"
            while True:
                buddy_wire.awaited(sock)
                self._take(sock, incarnation)
        except (OSError, Refused, InstepError) as error:
            log.info("the connection of %s for copies ended: %s", who, error)
        finally:
            self._sockets.discard(sock)
            sock.close()
            self._room.release()

    def _greet(self, sock: socket.socket, incarnation: int) -> int:
        source: list[int] = []

        def steps() -> Steps:
            source.append((yield from wire.answer(sock, secret=self._secret, incarnation=incarnation, rank=self._rank)))

        buddy_wire.greeted(sock, steps(), until=time.monotonic() + _STRANGER, go_on=lambda: self._current(incarnation))
        return source[0]

    def _take(self, sock: socket.socket, incarnation: int) -> None:
        """One offer. Until all of it has arrived and been digested, there is no copy of its step."""
        offer = buddy_wire.read_offer(sock)
        with self._lock:
            self._current(incarnation)
            before, spare = self._shelf.begin(offer.name, offer.step)
        arrangement = before.arrangement if before and before.arrangement.packed == offer.specs else Arrangement.unpack(offer.specs)
        if len(arrangement.sizes) != len(offer.digests):
            raise InstepError(f"an offer of shard group {offer.name!r} has {len(offer.digests)} digests for {len(arrangement.sizes)} parts")
        parts, wanted = _parts(arrangement, offer, before, Spares(spare))
        buddy_wire.send(sock, bytes(wanted))
        new = [part for part, flag in zip(parts, wanted, strict=True) if flag]
        buddy_wire.receive(sock, (part.bytes.data for part in new))
        if any(part.digest() != digest for part, digest, flag in zip(parts, offer.digests, wanted, strict=True) if flag):
            buddy_wire.send(sock, wire.NAK)
            raise InstepError(f"a copy of shard group {offer.name!r} of step {offer.step} arrived damaged on rank {self._rank}")
        copy = Copy(offer.name, offer.step, offer.replicas, offer.layouts, arrangement, parts, list(offer.digests))
        copy.told = offer.schema, offer.order
        with self._lock:
            self._current(incarnation)
            self._shelf.put(copy)
        buddy_wire.send(sock, wire.ACK)

    def _current(self, incarnation: int) -> None:
        if incarnation < self._incarnation:
            raise Refused("it belongs to an older incarnation")


def _parts(arrangement: Arrangement, offer: buddy_wire.Offer, before: Copy | None, spares: Spares) -> tuple[list[Part], list[bool]]:
    """The parts of a new copy, and which of them must come over the wire: those that the copy before has are shared with it."""
    parts: list[Part] = []
    wanted: list[bool] = []
    for number, (size, digest) in enumerate(zip(arrangement.sizes, offer.digests, strict=True)):
        same = before is not None and before.arrangement is arrangement and before.digests[number] == digest
        parts.append(before.parts[number] if before is not None and same else spares.part(size))
        wanted.append(not same)
    return parts, wanted
