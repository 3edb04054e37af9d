"""Ranks as threads: each runs the same functions with its own digests, over a gather that waits for all."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from instep import agreement
from instep.agreement import Gather
from instep.errors import UsageError

SECONDS = 20.0


def together(size: int, run: Callable[[int, Gather], object]) -> list[object]:
    """Run ``run(rank, gather)`` on every rank; the results, exceptions among them."""
    rows: dict[int, bytes] = {}
    barrier = threading.Barrier(size)

    def one(rank: int) -> object:
        def gather(data: bytes) -> Sequence[bytes]:
            rows[rank] = data
            barrier.wait(SECONDS)
            out = [rows[r] for r in range(size)]
            assert len({len(row) for row in out}) == 1
            barrier.wait(SECONDS)
            return out

        try:
            return run(rank, gather)
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_every_rank_knows_every_group() -> None:
    groups: list[dict[int, bytes]] = [{1: b"ab", 2: b"cd"}, {1: b"ab", 3: b"ef"}, {1: b"ab"}, {1: b"xx", 2: b"cd", 3: b"yy"}]
    said = together(4, lambda rank, gather: agreement.table(gather, groups[rank], size=2))
    expected = {1: {0: b"ab", 1: b"ab", 2: b"ab", 3: b"xx"}, 2: {0: b"cd", 3: b"cd"}, 3: {1: b"ef", 3: b"yy"}}
    assert said == [expected] * 4
    assert agreement.differing(expected) == {1: (0, 1, 2, 3), 3: (1, 3)}


def test_no_groups_at_all() -> None:
    assert together(2, lambda _, gather: agreement.table(gather, {}, size=8)) == [{}, {}]


def test_one_group_each_is_one_gather() -> None:
    def run(rank: int, gather: Gather) -> object:
        calls: list[bytes] = []

        def counted(data: bytes) -> Sequence[bytes]:
            calls.append(data)
            return gather(data)

        return agreement.table(counted, {1: bytes([rank])}, size=1), len(calls)

    assert together(3, run) == [({1: {0: b"\0", 1: b"\1", 2: b"\2"}}, 1)] * 3


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"a": "1", "b": "2"}, None, {"a": "1", "b": "3"}], "'b' differs between ranks before the first block: {0: '2', 2: '3'}"),
        ([{"a": "1"}, None, {"a": "1", "b": "3"}], r"differs in structure between ranks [0, 2]"),
        ([{"a": "1"}, None, {"a": "1"}], r"differs in structure between ranks [0, 2]"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(parts: Sequence[Mapping[str, str] | None], expected: str) -> None:
    said = together(3, lambda rank, gather: agreement.explain(gather, (0, 2), parts[rank], rank))
    assert all(expected in str(text) for text in said)
    assert len(set(map(str, said))) == 1


def test_names_are_known_by_number() -> None:
    assert agreement.key("replica") == agreement.key("replica") != agreement.key("shards@0")
