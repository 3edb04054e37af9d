"""The cast of bootstrap_scale.py: ranks, roots and agent as threads that speak NCCL's and instep's real messages over real sockets."""

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from bootstrap_counting import CountingProxy, Ledger

from instep import messages
from instep.model import Address, AddressBook
from instep_init_nccl.bootstrap import HEADS, INFO, LENGTH, OPENING, Hello, first_of, opening, root_of
from instep_init_nccl.ids import UniqueId
from instep_init_nccl.mini_root import MiniRoot

HOST = "127.0.0.1"
PATIENCE = 120.0
WAIT = timedelta(seconds=PATIENCE)
HEAD = HEADS[-1]
SECRET = secrets.token_bytes(32)


def everybody(size: int, work: Callable[[int], None]) -> None:
    """Run `work` for each rank at once. Raises what the first of them raised."""
    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(work, rank) for rank in range(size)]:
            done.result(PATIENCE)


def card(rank: int) -> bytes:
    """What stands for the address of a rank in NCCL's ring."""
    return struct.pack("<i", rank).ljust(INFO, b"\0")


def exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection ended early")
        data += part
    return data


def receive(listener: socket.socket) -> tuple[int, bytes, int]:
    """Accept one connection with one message: its magic, its payload, and its bytes on the wire."""
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE)
    with connection:
        magic, _ = OPENING.unpack(exactly(connection, OPENING.size))
        (size,) = LENGTH.unpack(exactly(connection, LENGTH.size))
        return magic, exactly(connection, size), OPENING.size + LENGTH.size + size


class Root(threading.Thread):
    """A root of stock NCCL: hears its own ranks, and with more roots than one the first rank of the next; answers when all are there."""

    def __init__(self, index: int, *, size: int, roots: int) -> None:
        super().__init__(daemon=True)
        self.index, self.size, self.roots = index, size, roots
        self.first, end = first_of(index, size, roots), first_of(index + 1, size, roots)
        self.own = range(self.first, end)
        self.listener = socket.create_server((HOST, 0), backlog=4096)
        self.id = UniqueId(int.from_bytes(secrets.token_bytes(8), "little"), HOST, self.listener.getsockname()[1])
        self.start()

    def run(self) -> None:
        heard: dict[int, Hello] = {}
        with self.listener:
            while len(heard) < len(self.own) + (self.roots > 1):
                magic, payload, _ = receive(self.listener)
                hello = Hello.decode(payload)
                if (magic, hello.ranks, hello.root, hello.roots) != (self.id.magic, self.size, self.index, self.roots):
                    raise SystemExit(f"a root heard a hello that is not for it: {hello}")
                heard[hello.rank] = hello
        for rank in self.own:
            after = heard[rank + 1 if rank + 1 in heard else self.first].info
            with socket.create_connection(heard[rank].address, PATIENCE) as connection:
                connection.sendall(opening(magic, after))


def meet(rank: int, ids: Sequence[bytes], *, size: int, ledger: Ledger, owner: Callable[[int], str]) -> None:
    """What a rank of NCCL does until it knows the next one. `owner` is the process of a root."""
    me, roots = f"rank {rank}", len(ids)
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(PATIENCE)
        mine = root_of(rank, size, roots)

        def hello(told: int, index: int) -> None:
            root = UniqueId.decode(ids[index])
            what = Hello(told, size, index, roots, (HOST, listener.getsockname()[1]), card(rank))
            data = opening(root.magic, what.encode(HEAD))
            ledger.add(me, owner(index), len(data))
            with socket.create_connection((root.host, root.port), PATIENCE) as connection:
                connection.sendall(data)

        hello(rank, mine)
        before = (rank - 1) % size
        if roots > 1 and root_of(before, size, roots) != mine:
            hello(before + 1, root_of(before, size, roots))
        magic, payload, count = receive(listener)
        ledger.add(owner(mine), me, count)
    if magic != UniqueId.decode(ids[mine]).magic or payload != card((rank + 1) % size):
        raise SystemExit(f"rank {rank} was told of a wrong neighbour")


def serve_store() -> dist.TCPStore:
    """A server of torch's on an IPv4 socket: on its own, dual one it asks DNS for the name of each mapped address that connects."""
    listener = socket.create_server((HOST, 0), backlog=4096)
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, timeout=WAIT, master_listen_fd=listener.detach())


def stock(size: int, roots: int) -> Ledger:
    """Stock torch: everybody joins a TCPStore, roots put their ids there, all others read them. One root, or several."""
    ledger = Ledger()
    server = serve_store()
    proxy = CountingProxy(ledger, port=server.port, ranks=size, name="store")
    ports = proxy.ports
    clients: list[dist.Store] = []

    def owner(index: int) -> str:
        return f"rank {first_of(index, size, roots)}"

    def rank(number: int) -> None:
        client = dist.TCPStore(HOST, ports[number], size, is_master=False, timeout=WAIT)
        clients.append(client)
        store = dist.PrefixStore("cuda/", dist.PrefixStore("0/", dist.PrefixStore("default_pg", client)))
        index = root_of(number, size, roots)
        root = Root(index, size=size, roots=roots) if number == first_of(index, size, roots) else None
        key = "0" if roots == 1 else f"UniqueNCCLID:{index}"
        if root:
            store.set(key, root.id.encode())
        if roots > 1:
            ids = store.multi_get([f"UniqueNCCLID:{other}" for other in range(roots)])
        else:
            ids = [root.id.encode() if root else store.get(key)]
        meet(number, ids, size=size, ledger=ledger, owner=owner)
        if root:
            root.join(PATIENCE)

    try:
        everybody(size, rank)
    finally:
        clients.clear()
        proxy.close()
        del server
    return ledger


def rootless(size: int) -> tuple[Ledger, Ledger]:
    """Ours: the agent gathers the book once; then ids are computed, and each rank has a root of its own. Book and bootstrap apart."""
    book, ledger = Ledger(), Ledger()
    roots = [MiniRoot(secret=SECRET, host=HOST) for _ in range(size)]
    pipes = [socket.socketpair() for _ in range(size)]
    agent = threading.Thread(target=gather, args=([near for near, _ in pipes], book), daemon=True)
    agent.start()

    def rank(number: int) -> None:
        pipe = pipes[number][1]
        pipe.settimeout(PATIENCE)
        address = Address(rank=number, birth=0, host=HOST, ports={"nccl": roots[number].port})
        hello = messages.encode(messages.Hello(rank=number, birth=0, address=address))
        book.add(f"rank {number}", "agent", len(hello))
        pipe.sendall(hello)
        (welcome,) = read(pipe, messages.Decoder())
        if not isinstance(welcome, messages.Welcome) or welcome.book is None:
            raise SystemExit(f"rank {number} was sent no book")
        magic = roots[number].expect(0, "0", "0")
        ids = [UniqueId(magic, peer.host, peer.ports["nccl"]).encode() for peer in welcome.book.addresses]
        meet(number, ids, size=size, ledger=ledger, owner=lambda index: f"rank {index}")

    try:
        everybody(size, rank)
        agent.join(PATIENCE)
    finally:
        for root in roots:
            root.close()
        for pipe in (end for pair in pipes for end in pair):
            pipe.close()
    return book, ledger


def gather(pipes: Sequence[socket.socket], ledger: Ledger) -> None:
    """The agent at the start of a job: hears everybody, sends everybody the book."""
    hellos = [read(pipe, messages.Decoder())[0] for pipe in pipes]
    addresses = tuple(hello.address for hello in hellos if isinstance(hello, messages.Hello))
    welcome = messages.Welcome(incarnation=0, book=AddressBook(incarnation=0, addresses=addresses), config={}, secret=SECRET.hex())
    data = messages.encode(welcome)
    for rank, pipe in enumerate(pipes):
        ledger.add("agent", f"rank {rank}", len(data))
        pipe.sendall(data)


def read(pipe: socket.socket, decoder: messages.Decoder) -> Sequence[messages.Message]:
    """The next messages of a channel."""
    while not (heard := decoder.feed(pipe.recv(1 << 16))):
        continue
    return heard
