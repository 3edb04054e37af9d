"""Real NCCL libraries: their ids are what is computed here, and their roots and mini roots can stand for each other."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from libraries import Nccl
from scripted import ScriptedRank, in_a_ring, join_all

from instep_init_nccl.bootstrap import retire
from instep_init_nccl.ids import ENV_MAGIC, UniqueId
from instep_init_nccl.mini_root import MiniRoot, unique_ids

SECRET = b"secret"
Make = Callable[[int], list[MiniRoot]]


@pytest.fixture
def make_roots() -> Iterator[Make]:
    """Makes mini roots and closes them after the test."""
    made: list[MiniRoot] = []

    def make(count: int) -> list[MiniRoot]:
        roots = [MiniRoot(secret=SECRET, host="127.0.0.1") for _ in range(count)]
        made.extend(roots)
        return roots

    yield make
    for root in made:
        root.close()


def computed(roots: list[MiniRoot], incarnation: int, group: str = "world") -> list[bytes]:
    return unique_ids(SECRET, incarnation, group, "0", [(root.host, root.port) for root in roots])


def expecting(roots: list[MiniRoot], incarnation: int, group: str = "world") -> list[bytes]:
    for root in roots:
        root.expect(incarnation, group, "0")
    return computed(roots, incarnation, group)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_id_is_read_and_written_as_nccl_does(nccl: Nccl) -> None:
    raw = nccl.unique_id()
    read = UniqueId.decode(raw)
    assert read.encode() == raw
    assert read.host == "127.0.0.1"
    socket.create_connection((read.host, read.port), 5).close()


def test_the_id_of_an_address_is_what_nccl_gives_for_it(nccl: Nccl) -> None:
    with Nccl(nccl.path, {"NCCL_COMM_ID": "127.0.0.1:17171"}) as named:
        assert named.unique_id() == UniqueId(ENV_MAGIC, "127.0.0.1", 17171).encode()
    with Nccl(nccl.path, {"NCCL_COMM_ID": "[::1]:17171"}) as named:
        assert named.unique_id() == UniqueId(ENV_MAGIC, "::1", 17171).encode()


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (2, 2), (8, 1), (8, 2), (8, 8), (9, 4), (64, 1), (64, 8), (64, 64)])
def test_real_roots_put_scripted_ranks_in_a_ring(nccl: Nccl, size: int, count: int) -> None:
    ids = [nccl.unique_id() for _ in range(count)]
    assert in_a_ring(join_all(size, ids, head=nccl.head))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_mini_roots_stand_for_real_ones(nccl: Nccl, make_roots: Make, size: int) -> None:
    roots = make_roots(size)
    assert in_a_ring(join_all(size, [nccl.unique_id() for _ in range(size)], head=nccl.head))
    for incarnation in range(3):
        assert in_a_ring(join_all(size, expecting(roots, incarnation), head=nccl.head))
    assert [root.served for root in roots] == [3] * size


@pytest.mark.parametrize("size", [2, 8])
def test_real_and_mini_roots_in_one_communicator(nccl: Nccl, make_roots: Make, size: int) -> None:
    """The magic of a root is its own, so roots of both kinds can serve one ring."""
    roots = make_roots(size)
    mixed = [ours if rank % 2 else nccl.unique_id() for rank, ours in enumerate(expecting(roots, 0))]
    assert in_a_ring(join_all(size, mixed, head=nccl.head))
    assert [root.served for root in roots] == [rank % 2 for rank in range(size)]


def test_an_idle_real_root_is_ended(nccl: Nccl) -> None:
    nccl.unique_id()
    before = nccl.holdings()
    ids = [UniqueId.decode(nccl.unique_id()) for _ in range(8)]
    assert nccl.holdings() == (before[0] + 8, before[1] + 8)
    assert all(retire(one, head=nccl.head) for one in ids)
    assert nccl.holdings(settle=before) == before


def test_symbols_that_routes_depend_on(nccl: Nccl) -> None:
    names = nccl.ask("names")
    assert "ncclCommInitRankScalable" in names
    assert ("ncclCommRevoke" in names) == (nccl.version >= 22900)


# ---- mini roots alone


@pytest.mark.parametrize("head", [16, 20])
def test_groups_and_incarnations_side_by_side(make_roots: Make, head: int) -> None:
    roots = make_roots(4)
    names = ["world", "a", "b"]
    ids = {name: expecting(roots, 5, name) for name in names}
    rings = [[ScriptedRank(rank, 4, ids[name], head=head) for rank in range(4)] for name in names]
    for rank in (rank for ring in rings for rank in ring):
        rank.start()
    for ring in rings:
        for rank in ring:
            rank.join(40)
        assert in_a_ring(ring)


def test_a_neighbour_may_come_before_the_own_rank_is_there(make_roots: Make) -> None:
    roots = make_roots(2)
    ids = computed(roots, 0)
    roots[1].expect(0, "world", "0")
    early = ScriptedRank(1, 2, ids, head=20)
    early.start()
    early.join(0.2)
    assert early.is_alive()
    roots[0].expect(0, "world", "0")
    late = ScriptedRank(0, 2, ids, head=20)
    late.start()
    for rank in (late, early):
        rank.join(40)
    assert in_a_ring([late, early])


def test_hellos_of_an_older_incarnation_are_dropped(make_roots: Make) -> None:
    """A straggler's hello, heard before or after the next incarnation opened, never reaches its ring."""
    roots = make_roots(3)
    old = expecting(roots, 0)
    straggler = ScriptedRank(1, 3, old, head=20, life=99)
    straggler.say(("127.0.0.1", 1))
    for root in roots:
        root.advance(1)
    straggler.say(("127.0.0.1", 1))
    ranks = join_all(3, expecting(roots, 1), head=20)
    assert in_a_ring(ranks)
    assert [rank.life for rank in ranks] == [0, 0, 0]
    # The first hello may have been read before the next incarnation opened, and was then forgotten.
    until(lambda: all(root.dropped for root in roots[:2]))
    assert roots[2].dropped == 0


def test_a_killed_rank_is_replaced_by_another_birth_at_another_address(make_roots: Make) -> None:
    roots = make_roots(3)
    assert in_a_ring(join_all(3, expecting(roots, 0), head=20, lives=[0, 0, 0]))
    roots[1].close()
    roots[1] = make_roots(1)[0]
    for root in roots:
        root.advance(1)
    ranks = join_all(3, expecting(roots, 1), head=20, lives=[0, 1, 0])
    assert in_a_ring(ranks)
    assert [rank.life for rank in ranks] == [1, 0, 0]


def test_a_rank_that_waits_for_a_dead_neighbour_gives_up_when_the_next_incarnation_opens(make_roots: Make) -> None:
    roots = make_roots(2)
    alone = ScriptedRank(0, 2, expecting(roots, 0), head=20)
    alone.start()
    alone.join(0.2)
    assert alone.is_alive()
    roots[0].advance(1)
    alone.join(20)
    assert alone.error == "AssertionError: a message of 129 bytes"


def test_ids_that_are_not_used_leave_nothing(make_roots: Make) -> None:
    roots = make_roots(2)
    join_all(2, expecting(roots, 0), head=20)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for incarnation in range(1, 300):
        expecting(roots, incarnation)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    for root in roots:
        root.advance(300)
    assert in_a_ring(join_all(2, expecting(roots, 300), head=20))


@pytest.mark.parametrize("noise", [b"", b"\0" * 11, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, b"\0" * 5000])
def test_strangers_do_no_harm(make_roots: Make, noise: bytes) -> None:
    roots = make_roots(2)
    ids = expecting(roots, 0)
    with socket.create_connection((roots[0].host, roots[0].port), 5) as stranger:
        stranger.sendall(noise)
    assert in_a_ring(join_all(2, ids, head=16))
