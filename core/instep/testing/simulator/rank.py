"""A simulated rank under the very ``Lifecycle``, ``Engine``, ``Commit`` and ``Blocks`` of a real one.

It stands in for ``instep.torch.local.LocalRank`` and what hangs on it: transport, processes, tensors and time are simulated here, every
decision is core's.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from instep.agent.records import State
from instep.board import Board, deliver
from instep.errors import InstepError
from instep.hooks import CommsRequest, Recovery
from instep.lifecycle import Lifecycle
from instep.messages import Hello, Interrupt, Message
from instep.model import Address, Fault, Group, Plan, Status, Vote
from instep.standing import Standing
from instep.testing.simulator import clock, model
from instep.testing.simulator.network import Meeting
from instep.testing.simulator.parts import Comms, Config, Followers, Gate, NodeBarrier, Unwinder
from instep.testing.simulator.plugin import BACKEND, SLICE, loaded
from instep.testing.simulator.process import Process
from instep.testing.simulator.state import REPLICA, Idle, Private, RankState, SharedParts

if TYPE_CHECKING:
    from instep.engine import Engine
    from instep.torch.reset import Modes

_FIRST, _LONGEST = 0.005, 0.1
"""Seconds between the rounds of quiesce, as in ``instep.torch.control``."""
_RESTORE = 30.0
"""Seconds that ``restore_state`` is given."""


class Rank(Idle):
    """Everything of one birth of a rank."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.rank = self.local_rank = process.rank
        self.world_size = self.world.schedule.world
        self.incidents = 0
        self.connecting = -1
        self.config, self.comms, self.followers = Config(), Comms(self), Followers(self)
        fresh = process.birth > 0
        self.board: Board = clock.board(process.clock, current=-1 if fresh else 0)
        self.standing = Standing(process.memory.words, status=Status.FRESH if fresh else Status.CLEAN)
        process.memory.words.put("step", 0)
        process.memory.words.put("joined", -1)
        self.standing.at(State.SETUP)
        self.shared: model.Shared = (0, process.birth) if fresh else self.world.reference.shared[0]
        self.gate, self.unwinder = Gate(self, loopback=fresh), Unwinder(self)
        self.barrier = NodeBarrier(self)
        self.state = RankState(self, Private(process, model.first_private(self.rank, self.world.schedule.seed)))
        self._sequence = 0
        self._watched = False
        process.local = self
        process.reader(self._on_message)

    # ---- instep.torch.local.LocalRank, as the engine uses it

    def join(self, engine: "Engine") -> None:
        """Meet the agent and the other ranks."""
        self.engine = engine
        engine.clock = self.process.clock.time
        self._address = Address(rank=self.rank, birth=self.process.birth, host="simulated")
        self.tell(Hello(rank=self.rank, birth=self.process.birth, address=self._address))
        self.board.wait(lambda b: b.welcome is not None, what="all ranks to call instep.init()")
        welcome = self.board.welcome
        if welcome is None:
            raise InstepError("the welcome disappeared")
        self.finished = welcome.finished
        self.point("setup")
        if welcome.book is not None:
            request = CommsRequest(BACKEND, self.rank, 0, self._groups, welcome.book, self.board.checker(0))
            loaded().first("reinit_comms", request=request)
        self.lifecycle = Lifecycle(self.board, loaded(), self, self.tell, self.process.clock.time)
        self.process.interruptible = self.unwinder.lands
        self._watched = True

    def begin(self) -> int:
        """There was no earlier run."""
        return self.standing.step

    def agree(self) -> None:
        """Before the first block: prove that all ranks start from equal shared state."""
        if len(set(self.comms.gather(b"%d" % SharedParts(self).digest()))) > 1:
            raise InstepError("ranks start from different states")
        self.standing.header.put("joined", 0)

    def tell(self, message: Message) -> None:
        """Send a message to the agent."""
        self.process.tell(message)

    def point(self, name: str) -> None:
        """A place where anything may happen."""
        self.process.place(name)

    def mark_groups(self) -> None:
        """There is one group, the world."""

    unmake_groups = mark_groups

    def unwound(self, modes: "Modes") -> None:  # noqa: ARG002 - there are no modes
        """The block was cut."""
        self.gate.body = False
        self.unwinder.reset()

    # ---- instep.lifecycle.Local

    def settle(self) -> None:
        """Lay communicators to rest."""
        self.gate.broken = False

    def vote(self, incarnation: int) -> Vote:
        """What this rank holds now."""
        for _plugin, announce in loaded().each("announce", groups=self._groups):
            announce()
        return Vote(
            rank=self.rank,
            birth=self.process.birth,
            incarnation=incarnation,
            block=self.standing.block,
            step=self.standing.step,
            status=self.standing.status,
            groups=self._groups,
            address=self._address,
            shards={REPLICA: self.world.everyone},
        )

    def phase(self, name: str) -> None:
        """Show the phase in the record."""
        self.standing.at(State.RECOVERY, operation=name)
        self.point(name)

    def requests(self, plan: Plan) -> Sequence[CommsRequest]:
        """The one group to connect."""
        self.world.checks.adopted(self, plan)
        self.point("connect")
        self.standing.must_hold(plan, self.rank)
        self._sequence = 0
        return [CommsRequest(BACKEND, self.rank, plan.incarnation, self._groups, plan.book, self.board.checker(plan.incarnation))]

    def recovery(self, plan: Plan) -> Recovery:
        """The argument of the later phases."""
        self.gate.loopback = False
        return Recovery(
            plan=plan,
            rank=self.rank,
            fresh=self.standing.status is Status.FRESH,
            torn=self.standing.status is Status.TORN,
            secret=b"",
            shards=(SharedParts(self),),
            check=self.board.checker(plan.incarnation),
            gather=self.comms.gather,
            point=self.point,
            deadline=self.process.clock.now + _RESTORE,
        )

    def reload(self, step: int) -> None:
        """Private state back from the record."""
        self.state.private.load(step)

    def in_step(self, plan: Plan) -> None:
        """The recovery succeeded."""
        self.standing.moved_to(plan.block, plan.step)
        self.standing.header.put("joined", plan.incarnation)
        self.incidents += 1
        self.engine.rejoined()
        self.world.checks.joined(self, plan)

    # ---- the simulated machine

    def tearing(self) -> None:
        """Shared state is about to be written by a transfer."""
        if self.standing.status is not Status.FRESH:
            self.standing.status = Status.TORN

    def meet(self, label: str, sequence: int, *, incarnation: int, value: object = None) -> Meeting:
        """Arrive at a meeting."""
        meeting = self.world.network.meeting(incarnation, (label, sequence))
        meeting.arrive(self.process, value)
        return meeting

    def collective(self, label: str, value: object) -> dict[int, object]:
        """The values of all ranks. Raises ``Interrupted`` on a fault elsewhere, ``CommsError`` when a connection broke."""
        self._sequence += 1
        sequence, incarnation = self._sequence, self.process.incarnation
        meeting = self.meet(label, sequence, incarnation=incarnation, value=value)
        self.point("collective")
        with self.gate.waiting(label, sequence):
            while (outcome := meeting.wait(self.rank, SLICE)) is None:
                self.gate.check()
        if not outcome:
            self.gate.failed(label)
        return meeting.values

    @property
    def _groups(self) -> tuple[Group, ...]:
        return (Group(name="world", ranks=self.world.everyone, backend=BACKEND),)

    def _on_message(self, message: Message) -> None:
        if not isinstance(message, Interrupt):
            deliver(self.board, message)
            return
        news = self.board.interrupt(message.incarnation, message.fault)
        self.process.nudge()
        if news and self._watched and not self.gate.loopback:
            self.process.thread(lambda: self._quiesce(message.incarnation, message.fault))

    def _quiesce(self, incarnation: int, fault: Fault) -> None:
        pause = _FIRST
        while self._quiesced(incarnation, fault):
            if self.board.acknowledged >= incarnation:
                return
            if clock.here().park(pause):
                return
            self.unwinder.insist()
            pause = min(2 * pause, _LONGEST)

    def _quiesced(self, incarnation: int, fault: Fault) -> bool:
        try:
            return self.lifecycle.quiesce(incarnation, fault)
        except Exception as error:  # noqa: BLE001 - as a plugin may raise anything; main still has to be told
            self.world.trace(f"rank {self.rank}: quiesce failed: {error}")
            return True


def main(script: Callable[[Rank], None]) -> Callable[[Process], None]:
    """The main thread of a process that runs a script."""

    def run(process: Process) -> None:
        rank = Rank(process)
        script(rank)
        rank.standing.at(State.ENDED)
        rank.point("ended")

    return run
