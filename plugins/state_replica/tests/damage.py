"""A proxy in front of a port that flips one bit of what its server says."""

import socket
import threading
from contextlib import suppress


class Damage:
    """Flips a bit of the byte number ``at`` of each connection, counted in what its server says."""

    def __init__(self, port: int, at: int) -> None:
        self._target, self._at = port, at
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
                threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, self._at), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, at: int | None) -> None:
        passed = 0
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if at is not None and passed <= at < passed + len(data):
                    data[at - passed] ^= 1
                passed += len(data)
                target.sendall(data)
