"""A proxy in front of a port that flips one bit of what passes."""

import socket
import threading
from contextlib import suppress


class Damage:
    """Flips a bit of the byte number ``at`` of each connection, counted in what its server says, or in what its client does.

    ``flipped`` is how often it did.
    """

    def __init__(self, port: int, at: int, *, client: bool = False) -> None:
        self._target, self._at, self._client = port, at, client
        self.flipped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                ats = (self._at, None) if self._client else (None, self._at)
                threading.Thread(target=self._pump, args=(client, server, ats[0]), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, ats[1]), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, at: int | None) -> None:
        passed = 0
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if at is not None and passed <= at < passed + len(data):
                    data[at - passed] ^= 1
                    self.flipped += 1
                passed += len(data)
                target.sendall(data)
