"""The lifecycle of one rank against an agent in miniature: a newer fault may come at any moment of an attempt."""

from collections.abc import Callable, Sequence

import pytest

from instep.board import Board, deliver
from instep.errors import CommsError, InstepError, Interrupted, UsageError
from instep.hooks import CommsRequest, Communicator, Interruption, Plugin, Recovery, hookimpl
from instep.lifecycle import Lifecycle
from instep.messages import Faulted, Joined, Message, Planned, Voted
from instep.model import Address, AddressBook, Fault, Plan, Receipt, Role, Status, Vote
from instep.plugins import LoadedPlugins

FAULT = Fault(kind="exit", ranks=(1,), detail="gone", detected_by="agent", at=0.0)


class World:
    """The agent, the rank below the lifecycle and its plugin; ``at(n)`` runs ``cut`` when the n-th call is made."""

    def __init__(self) -> None:
        self.board = Board()
        self.calls: list[str] = []
        self.told: list[Message] = []
        self.joined: list[int] = []
        self.cut: Callable[[str], None] = lambda name: None
        self.publishes = True
        world = self

        class Everything(Plugin):
            @hookimpl
            def quiesce(self, interruption: Interruption) -> None:
                world.call("quiesce")

            @hookimpl
            def reinit_comms(self, request: CommsRequest) -> Sequence[Communicator]:
                world.call("reinit_comms")
                return []

            @hookimpl
            def restore_state(self, recovery: Recovery) -> Receipt:
                world.call("restore_state")
                return Receipt(phase="restore_state", plugin="everything", rank=0, seconds=0.0, bytes=7)

            @hookimpl
            def verify(self, recovery: Recovery) -> None:
                world.call("verify")

        self.lifecycle = Lifecycle(self.board, LoadedPlugins({"everything": Everything()}), self, self.tell, lambda: 1.5)

    def publish(self) -> None:
        self.call("publish")

    def call(self, name: str) -> None:
        self.calls.append(name)
        self.cut(name)

    def tell(self, message: Message) -> None:
        self.told.append(message)
        if isinstance(message, Voted) and message.vote.incarnation == self.board.target:
            deliver(self.board, Planned(plan=plan(message.vote.incarnation)))
        if isinstance(message, Faulted) and message.incarnation == self.board.target:
            self.board.interrupt(message.incarnation + 1, message.fault)

    # ---- instep.lifecycle.Local

    rank = 0

    def settle(self) -> None:
        self.call("settle")

    def vote(self, incarnation: int) -> Vote:
        self.call("vote")
        address = Address(rank=0, birth=0, host="h")
        return Vote(rank=0, birth=0, incarnation=incarnation, block=0, step=3, status=Status.CLEAN, groups=(), address=address)

    def meanwhile(self, check: Callable[[], None], planned: Callable[[], bool]) -> None:
        self.call("meanwhile")
        assert planned()

    def phase(self, name: str) -> None:
        self.call(f"phase {name}")

    def requests(self, plan: Plan) -> Sequence[CommsRequest]:
        self.call("requests")
        return [CommsRequest("gloo", 0, plan.incarnation, [], plan.book, lambda: None)]

    def install(self, request: CommsRequest, answer: tuple[str, object] | None) -> None:
        self.call("install")

    def recovery(self, plan: Plan) -> Recovery:
        self.call("recovery")
        return Recovery(plan, 0, False, False, b"", None, lambda: None, lambda d: [d], lambda n: None, 0.0)  # type: ignore[arg-type]

    def reload(self, step: int) -> None:
        self.call("reload")

    def in_step(self, plan: Plan) -> None:
        self.joined.append(plan.incarnation)


def plan(incarnation: int) -> Plan:
    book = AddressBook(incarnation=incarnation, addresses=())
    return Plan(incarnation=incarnation, block=0, step=3, roles=(Role.KEEP,), donors={}, book=book)


def interrupted() -> World:
    world = World()
    world.board.interrupt(1, FAULT)
    return world


def test_an_undisturbed_attempt() -> None:
    world = interrupted()
    world.lifecycle.rejoin()
    assert world.joined == [1]
    joined = world.told[-1]
    assert isinstance(joined, Joined)
    assert [r.phase for r in joined.receipts] == ["reinit_comms", "restore_state", "publish", "resume_data", "verify"]
    assert [r.bytes for r in joined.receipts] == [0, 7, 0, 0, 0]
    assert not world.lifecycle.quiesce(1, FAULT)


CALLS = interrupted()
CALLS.lifecycle.rejoin()


@pytest.mark.parametrize("at", range(len(CALLS.calls)), ids=lambda n: f"{n}-{CALLS.calls[n]}".replace(" ", "-"))
@pytest.mark.parametrize("how", ["goes on", "raises Interrupted", "fails because of it"])
def test_a_newer_fault_at_any_moment(at: int, how: str) -> None:
    """Whatever the call does about it, the rank joins the newer incarnation once, and reports no fault of its own."""
    world = interrupted()

    def cut(name: str) -> None:
        if len(world.calls) == at + 1:
            world.board.interrupt(2, FAULT)
            if how == "raises Interrupted":
                raise Interrupted("by a check")
            if how == "fails because of it" and name not in ("quiesce", "settle", "vote") and not name.startswith("phase"):
                raise CommsError("connection closed")

    world.cut = cut
    world.lifecycle.rejoin()
    assert world.joined == [2]
    assert not [m for m in world.told if isinstance(m, Faulted)]
    assert world.board.current == 2


@pytest.mark.parametrize("name", ["reinit_comms", "install", "restore_state", "publish", "reload", "verify", "vote", "quiesce", "settle"])
def test_a_phase_that_fails_is_named_and_the_next_attempt_goes_on(name: str) -> None:
    world = interrupted()
    failures = iter([True])

    def cut(call: str) -> None:
        if call == name and next(failures, False):
            raise InstepError(f"{name} failed")

    world.cut = cut
    world.lifecycle.rejoin()
    (fault,) = [m for m in world.told if isinstance(m, Faulted)]
    phase = {"install": "reinit_comms", "reload": "resume_data", "vote": "quiesce", "settle": "quiesce"}.get(name, name)
    assert (fault.incarnation, fault.phase) == (1, phase)
    assert f"{name} failed" in fault.fault.detail
    assert world.joined == [2]


def test_the_phase_of_an_older_attempt_is_not_blamed() -> None:
    world = interrupted()
    failures = iter(["restore_state", "vote"])
    wanted = [next(failures)]

    def cut(call: str) -> None:
        if wanted and call == wanted[0]:
            wanted[:] = [n] if (n := next(failures, None)) else []
            raise InstepError("failed")

    world.cut = cut
    world.lifecycle.rejoin()
    assert [m.phase for m in world.told if isinstance(m, Faulted)] == ["restore_state", "quiesce"]


def test_a_script_that_breaks_the_contract_is_not_tried_again() -> None:
    world = interrupted()

    def cut(call: str) -> None:
        if call == "restore_state":
            raise UsageError("the donor protects other objects")

    world.cut = cut
    with pytest.raises(UsageError, match="other objects"):
        world.lifecycle.rejoin()
    assert world.joined == []


def test_quiesce_stops_at_the_acknowledgement_and_at_newer_news() -> None:
    world = interrupted()
    assert world.lifecycle.quiesce(1, FAULT)
    world.board.interrupt(2, FAULT)
    assert not world.lifecycle.quiesce(1, FAULT)
    assert world.lifecycle.quiesce(2, FAULT)
    world.lifecycle.acknowledge()
    assert not world.lifecycle.quiesce(2, FAULT)
