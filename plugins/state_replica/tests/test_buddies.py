"""Copies between two buddies in one process, over real sockets: what travels, what is kept, and what is refused."""

import functools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from instep.errors import InstepError
from instep.hooks import Holding, Job, SharedState
from instep.model import Address, AddressBook
from instep.torch.shared import Shared
from instep_state_replica import buddy_wire, copies_tree
from instep_state_replica.buddy import PORT, Buddy, offset
from instep_state_replica.copies import Arrangement, Copy, Look, Shelf, Spares, capture, spec

SECRET = b"s" * 32
LARGE = 300
"""Width of a layer whose matrix is a part of its own."""


class Held:
    """As much of ``hooks.Holding`` as copies need: a model and its optimizer, which only this rank has."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        self.model = nn.ModuleDict({"small": nn.Linear(7, 5), "frozen": nn.Linear(LARGE, LARGE), "large": nn.Linear(LARGE, LARGE)})
        self.model["frozen"].requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], foreach=False)
        self.info: dict[str, object] = {"steps": 0, "rate": 0.1}
        self.shared = Shared(rank=rank, world_size=1)
        for name, obj in (("model", self.model), ("optimizer", self.optimizer), ("info", self.info)):
            self.shared.add(name, obj)
        self.shared.check_coverage()
        self.shared.replicas = (rank,)
        self.shared.name = f"shards@{rank}"

    def train(self) -> None:
        """A step."""
        for p in self.optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.info["steps"] = int(str(self.info["steps"])) + 1

    def shards(self) -> Sequence[SharedState]:
        return self.shared.shares()


class Pair:
    """Rank 0 and rank 1, each the other's buddy."""

    def __init__(self) -> None:
        self.held = [Held(rank) for rank in (0, 1)]
        self.buddies = [
            Buddy(
                Job(rank=r, world_size=2, local_rank=r, birth=0, host="127.0.0.1", secret=SECRET, holding=cast(Holding, self.held[r])),
                distance=0,
                connect=5.0,
            )
            for r in (0, 1)
        ]

    def book(self, incarnation: int = 0) -> AddressBook:
        addresses = tuple(Address(rank=r, birth=0, host="127.0.0.1", ports=self.buddies[r].ports) for r in (0, 1))
        return AddressBook(incarnation=incarnation, addresses=addresses)

    def keep(self, step: int, *, incarnation: int = 0, ranks: Sequence[int] = (0, 1)) -> None:
        for r in ranks:
            self.buddies[r].keep(step, self.book(incarnation))
        for r in ranks:
            until(functools.partial(self.buddies[r].settled, 0.05))

    def step(self, step: int) -> None:
        for held in self.held:
            held.train()
        self.keep(step)

    def close(self) -> None:
        for buddy in self.buddies:
            buddy.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def found(buddy: Buddy, name: str, step: int) -> Copy:
    copy = buddy.find(name, step)
    assert copy is not None
    return copy


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_buddy_keeps_what_a_donor_would_have_told(pair: Pair) -> None:
    for step in range(3):
        pair.keep(step) if step == 0 else pair.step(step)
        told, tensors = pair.held[0].shards()[0].describe()
        for buddy in pair.buddies:
            schema, copied = found(buddy, "shards@0", step).describe()
            assert schema == told
            assert equal(copied, tensors)
    assert pair.buddies[0].copies() == pair.buddies[1].copies() == {"shards@0": (1, 2), "shards@1": (1, 2)}


def test_what_never_changes_is_sent_and_stored_once(pair: Pair) -> None:
    pair.keep(0)
    pair.step(1)
    frozen = LARGE * LARGE * 4
    before = pair.buddies[0].sent
    pair.step(2)
    moved = pair.buddies[0].sent - before
    assert 3 * frozen < moved < 4 * frozen, "the large layer and its two moments, not the frozen one"
    copies = [found(pair.buddies[1], "shards@0", step) for step in (1, 2)]
    shared = [part for part in copies[0].parts if any(part is other for other in copies[1].parts)]
    assert [len(part.bytes) for part in shared] == [frozen]


def test_a_recovery_that_changed_nothing_sends_nothing_again(pair: Pair) -> None:
    pair.keep(0)
    pair.step(1)
    before = pair.buddies[0].sent
    for buddy in pair.buddies:
        buddy.quiesce(1)
    pair.keep(1, incarnation=1)
    assert pair.buddies[0].sent == before
    assert pair.buddies[1].copies() == {"shards@0": (0, 1), "shards@1": (0, 1)}


def test_copies_of_a_future_that_was_given_up_are_dropped(pair: Pair) -> None:
    pair.keep(0)
    pair.step(1)
    for buddy in pair.buddies:
        buddy.quiesce(1)
    pair.keep(0, incarnation=1)
    assert pair.buddies[1].copies() == {"shards@0": (0,), "shards@1": (0,)}


def test_nothing_changes_once_a_newer_incarnation_has_begun(pair: Pair) -> None:
    """Neither what the rank itself copies, nor what arrives from an owner that does not know yet."""
    pair.keep(0)
    pair.buddies[1].quiesce(1)
    pair.held[0].train()
    pair.buddies[0].keep(1, pair.book())
    with pytest.raises(InstepError, match="the copy of step 1 of rank 0 at its buddy, rank 1"):
        until(lambda: pair.buddies[0].settled(0.05))
    pair.buddies[1].keep(1, pair.book())
    assert pair.buddies[1].copies() == {"shards@0": (0,), "shards@1": (0,)}
    assert not pair.buddies[1].settled(0.05)


def test_a_changed_copy_is_named(pair: Pair) -> None:
    pair.keep(0)
    copy = found(pair.buddies[1], "shards@0", 0)
    copy.parts[1].bytes[5] ^= 4
    with pytest.raises(InstepError, match="'shards@0' of step 0 has changed in memory"):
        copy.describe()


def test_state_that_changes_outside_of_a_commit_is_never_acknowledged(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are not those that were digested, as if the wire had damaged them."""
    pair.keep(0)
    offer = buddy_wire.Offer.of

    def late(copy: Copy) -> buddy_wire.Offer:
        told = offer(copy)
        copy.parts[0].bytes[0] ^= 1
        return told

    monkeypatch.setattr(buddy_wire.Offer, "of", late)
    pair.held[0].train()
    pair.buddies[0].keep(1, pair.book())
    with pytest.raises(InstepError, match=r"arrived damaged \(digests differ\)"):
        until(lambda: pair.buddies[0].settled(0.05))
    assert pair.buddies[1].copies()["shards@0"] == (0,)


def test_strangers_change_nothing_and_block_nobody(pair: Pair) -> None:
    silent = [socket.create_connection(("127.0.0.1", pair.buddies[1].ports[PORT])) for _ in range(3)]
    rude = socket.create_connection(("127.0.0.1", pair.buddies[1].ports[PORT]))
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    pair.keep(0)
    assert pair.buddies[1].copies()["shards@0"] == (0,)
    for sock in (*silent, rude):
        with suppress(OSError):
            sock.close()


def test_a_buddy_is_on_another_machine_if_there_is_one() -> None:
    def addresses(*hosts: str) -> list[Address]:
        return [Address(rank=r, birth=0, host=host) for r, host in enumerate(hosts)]

    assert offset(addresses("a", "a", "a")) == 1
    assert offset(addresses("a", "a", "b", "b", "c", "c")) == 2
    assert offset(addresses("a", "b", "a", "b")) == 1
    assert offset(addresses("a", "a", "a", "b")) == 1, "not all can be apart"


def test_a_frame_holds_every_type_and_tells_what_changed() -> None:
    shared = torch.ones(3)
    tree = {
        "kinds": {}, "tensors": {"a": shared}, "buffers": {},
        "objects": {"b": [1, 2.5, None, "x", b"y", (True, {3: shared}), float("nan"), -0.0, torch.zeros(2, dtype=torch.bfloat16)],
                    "c": {"deep": [torch.arange(4)], "set": {1, 2}}},
    }  # fmt: skip
    taken = copies_tree.take(tree)
    assert len(taken.tensors) == 3
    rebuilt = copies_tree.rebuild(taken.frame, taken.tensors)
    assert copies_tree.take(rebuilt).frame == taken.frame
    again = copies_tree.take({**tree, "objects": {"b": [1.0], "c": {}}}).frame
    assert again != copies_tree.take({**tree, "objects": {"b": [1], "c": {}}}).frame != copies_tree.take({**tree, "objects": {}}).frame
    assert copies_tree.take(0.0).frame != copies_tree.take(-0.0).frame


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (200, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_all_kinds_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype), torch.randn(4, 6).T.to(dtype), torch.randn(5).to(dtype)[::2]]
    look = Look("g", (0,), False, {"kinds": {}, "tensors": {}, "buffers": {}, "objects": {"all": tensors}}, [])
    copy = capture(look, 0, None, Spares([]), bool)
    assert equal(copy.tensors(), tensors)
    assert Arrangement.unpack(copy.arrangement.packed).places == copy.arrangement.places
    assert spec(tensors[0])[1] == shape


def test_a_shelf_has_two_steps_and_gives_memory_back() -> None:
    shelf, state = Shelf(), torch.zeros(60_000)
    for step in range(6):
        before, spare = shelf.begin("g", step)
        assert (before is None) == (step == 0)
        assert (len(spare) > 0) == (step > 1)
        copy = capture(Look("g", (0,), False, {"t": state + step}, []), step, before, Spares(spare), bool)
        shelf.put(copy)
    assert shelf.steps() == {"g": (4, 5)}
    assert shelf.bytes() == 2 * state.nbytes
    shelf.drop("g", 5)
    assert shelf.get("g", 5) is None
