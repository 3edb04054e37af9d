"""Counting for bootstrap_scale.py: who sent how many messages and bytes to whom, and a proxy that counts what goes through it."""

import os
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Sequence

# torch's store asks DNS for the name of every peer, waits five seconds for a lost answer, and warns of one that has none.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Ledger:
    """Messages and bytes by process. Each message counts at both of its ends; a process that sends to itself has both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, source: str, target: str, size: int, *, new: bool = True) -> None:
        """``size`` bytes from one process to another; ``new`` unless they go on with a message that was counted."""
        with self._lock:
            for process in (source, target):
                self.messages[process] += new
                self.bytes[process] += size


class CountingProxy:
    """A way to a server for each rank, which counts in the ledger.

    A message is what goes one way until something comes back the other way: what the two libraries write with several calls is one.
    """

    def __init__(self, ledger: Ledger, *, port: int, ranks: int, name: str) -> None:
        self._ledger, self._port, self._name = ledger, port, name
        self._selector = selectors.DefaultSelector()
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        for rank, listener in enumerate(self._listeners):
            self._selector.register(listener, selectors.EVENT_READ, rank)
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._turn: dict[frozenset[socket.socket], socket.socket] = {}
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def ports(self) -> Sequence[int]:
        """Where each rank connects."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def close(self) -> None:
        """End it. Raises what went wrong in it."""
        self._stop.send(b"\0")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._stop.close()
        if self._failed:
            raise self._failed

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    match key.data:
                        case None:
                            return
                        case int(rank):
                            self._open(key.fileobj.accept()[0], f"rank {rank}")  # type: ignore[union-attr]
                        case (source, target, end):
                            self._pass_on(key.fileobj, end, source, target)
        except OSError as error:
            self._failed = error

    def _open(self, near: socket.socket, rank: str) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        self._selector.register(near, selectors.EVENT_READ, (rank, self._name, far))
        self._selector.register(far, selectors.EVENT_READ, (self._name, rank, near))

    def _pass_on(self, here: socket.socket, there: socket.socket, source: str, target: str) -> None:
        if here.fileno() < 0:
            return  # closed with the other end, in the same round
        data = here.recv(1 << 16)
        if not data:
            for end in (here, there):
                self._selector.unregister(end)
                end.close()
            return
        pair = frozenset((here, there))
        self._ledger.add(source, target, len(data), new=self._turn.get(pair) is not here)
        self._turn[pair] = here
        there.sendall(data)
