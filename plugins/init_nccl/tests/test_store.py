"""The store of a process group: computed where it can be, fetched from the rank that knows where it cannot."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from instep.errors import CommsError
from instep_init_nccl.ids import UniqueId
from instep_init_nccl.keys import Known, Root, parse
from instep_init_nccl.mini_root import MiniRoot
from instep_init_nccl.store import BookStore, Place

SECRET = b"s"
Make = Callable[..., list[BookStore]]


@pytest.fixture
def roots() -> Iterator[list[MiniRoot]]:
    made = [MiniRoot(secret=SECRET, host="127.0.0.1") for _ in range(4)]
    yield made
    for root in made:
        root.close()


@pytest.fixture
def make_stores(roots: list[MiniRoot]) -> Make:
    """The stores of all members of a group, one a rank."""

    def make(
        incarnation: int = 0, group: str = "world", seconds: float = 20.0, check: Callable[[], None] = lambda: None
    ) -> list[BookStore]:
        where = tuple((root.host, root.port) for root in roots)
        return [
            BookStore(root, Place(incarnation, group, rank, where), head=20, seconds=seconds, check=check)
            for rank, root in enumerate(roots)
        ]

    return make


def at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """What each call gives, all in threads of their own."""
    out: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            out[index] = calls[index]()
        except CommsError as error:
            out[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def keys(count: int) -> list[str]:
    return [f"UniqueNCCLID:{index}" for index in range(count)]


def test_keys() -> None:
    assert parse("UniqueNCCLID:17") == Root(17)
    assert parse("UniqueNCCLID:3:17") == Root(17)
    assert parse("0//cuda//4") == Known(0)
    assert parse("2:11") == Known(2)
    assert parse("exception_dump") is None


def test_as_many_roots_as_ranks_are_computed_alike_on_all(make_stores: Make, roots: list[MiniRoot]) -> None:
    seen = [store.multi_get(keys(4)) for store in make_stores()]
    assert all(ids == seen[0] for ids in seen)
    ids = [UniqueId.decode(raw) for raw in seen[0]]
    assert [(one.host, one.port) for one in ids] == [(root.host, root.port) for root in roots]
    assert len({one.magic for one in ids}) == 1


def test_groups_incarnations_and_communicators_have_ids_of_their_own(make_stores: Make) -> None:
    first, again = make_stores()[0], make_stores(incarnation=1)[0]
    other = make_stores(group="tp")[0]
    seen = [first.multi_get(keys(4))[0], first.multi_get(keys(4))[0], again.multi_get(keys(4))[0], other.multi_get(keys(4))[0]]
    assert len(set(seen)) == 4


def test_the_own_key_is_computed_too_and_the_root_behind_it_is_ended(make_stores: Make, nccl: "object") -> None:
    from libraries import Nccl

    assert isinstance(nccl, Nccl)
    nccl.unique_id()
    before = nccl.holdings()
    store = make_stores()[2]
    store._head = nccl.head
    mine = nccl.unique_id()
    store.set("UniqueNCCLID:2", mine)
    assert store.multi_get(keys(4))[2] != mine
    assert nccl.holdings(settle=before) == before


def test_a_single_root_is_fetched_from_rank_0(make_stores: Make) -> None:
    stores = make_stores()
    waiting: list[Callable[[], object]] = [lambda s=store: s.get("0") for store in stores[1:]]  # type: ignore[misc]
    assert at_once([*waiting, lambda: stores[0].set("0", b"a" * 128)])[:3] == [b"a" * 128] * 3
    stores[0].set("1", b"b" * 128)
    assert stores[3].get("1") == b"b" * 128


def test_a_pair_is_fetched_from_its_lower_rank(make_stores: Make) -> None:
    stores = make_stores()
    stores[1].set("1:3", b"p" * 128)
    assert stores[3].get("1:3") == b"p" * 128


def test_few_roots_for_many_ranks_are_fetched_each_from_its_own(make_stores: Make) -> None:
    stores = make_stores()
    stores[0].set("UniqueNCCLID:0", b"0" * 128)
    stores[2].set("UniqueNCCLID:1", b"1" * 128)
    assert at_once([lambda s=store: s.multi_get(keys(2)) for store in stores]) == [[b"0" * 128, b"1" * 128]] * 4  # type: ignore[misc]


def test_an_owner_that_says_nothing_is_named(make_stores: Make) -> None:
    with pytest.raises(CommsError, match=r"'0' of group rank 0 in group 'world' did not come: no answer from 127.0.0.1"):
        make_stores(seconds=0.3)[1].get("0")


def test_waiting_for_an_id_can_be_given_up(make_stores: Make) -> None:
    def check() -> None:
        raise CommsError("given up")

    with pytest.raises(CommsError, match="given up"):
        make_stores(check=check)[1].get("0")


def test_an_older_incarnation_gets_no_answer(make_stores: Make, roots: list[MiniRoot]) -> None:
    old, new = make_stores(seconds=0.3), make_stores(incarnation=1)
    old[0].set("0", b"a" * 128)
    roots[0].advance(1)
    new[0].set("0", b"b" * 128)
    with pytest.raises(CommsError, match="did not come"):
        old[1].get("0")
    assert new[1].get("0") == b"b" * 128


def test_a_request_without_the_secret_gets_no_answer(roots: list[MiniRoot]) -> None:
    stranger = MiniRoot(secret=b"another", host="127.0.0.1")
    roots[0].publish(0, "world/0/1", b"a")
    where = ((roots[0].host, roots[0].port), (stranger.host, stranger.port))
    store = BookStore(stranger, Place(0, "world", 1, where), head=20, seconds=0.3, check=lambda: None)
    with pytest.raises(CommsError, match="did not come"):
        store.get("0")
    stranger.close()


def test_an_unknown_key_is_an_error_that_names_it(make_stores: Make) -> None:
    store = make_stores()[0]
    assert not store.check(["dump"])
    with pytest.raises(CommsError, match="'dump'"):
        store.get("dump")
