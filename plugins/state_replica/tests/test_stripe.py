import random
import socket

import pytest

from instep_state_replica.stripe import Stripe, cut


def test_parts_cover_every_byte_once() -> None:
    for total in (0, 1, 5, 1000):
        for parts in (1, 3, 7):
            ranges = [cut(total, parts, i) for i in range(parts)]
            assert [n for start, end in ranges for n in range(start, end)] == list(range(total))


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_of_any_buffers_arrives_whole(seed: int) -> None:
    random.seed(seed)
    sizes = [random.choice([0, 1, 3, 4096, 70_000]) for _ in range(random.choice([1, 20, 700]))]
    source = [bytearray(random.randbytes(size)) for size in sizes]
    target = [bytearray(size) for size in sizes]
    total, halves = sum(sizes), 0

    def half() -> None:
        nonlocal halves
        halves += 1

    for index in range(3):
        start, end = cut(total, 3, index)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for sock in (ours, theirs):
                sock.setblocking(False)
            out = Stripe([memoryview(b) for b in source], start, end, chunk=10_000, half=half)
            into = Stripe([memoryview(b) for b in target], start, end, chunk=7_000, half=half)
            runs = [out.send(ours), into.receive(theirs)]
            while runs:
                for run in list(runs):
                    if next(run, None) is None:
                        runs.remove(run)
        assert out.digest() == into.digest()
        assert out.done == into.done == end - start
    assert target == source
    assert halves == (6 if total >= 3 else 2 * total)


def test_order_counts_in_a_digest() -> None:
    def digest(*parts: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stripe = Stripe([memoryview(p) for p in parts], 0, 4, chunk=100, half=lambda: None)
            list(stripe.send(ours))
            return stripe.digest()

    assert digest(b"ab", b"cd") == digest(b"abcd") != digest(b"cd", b"ab")
