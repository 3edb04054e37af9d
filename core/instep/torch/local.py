"""This rank, as the lifecycle and the session see it: link, gate, plugins and state, wired together once."""

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from instep.agent.barrier import NodeBarrier
from instep.agent.channel import Environment
from instep.agent.records import Header, State
from instep.board import Board
from instep.errors import InstepError
from instep.hooks import CommsRequest, Job, Recovery
from instep.injection import Injections
from instep.lifecycle import Lifecycle
from instep.link import Link
from instep.messages import Message, Welcome
from instep.model import Plan, Status, Vote
from instep.plugins import LoadedPlugins, prepared
from instep.standing import Standing
from instep.torch import joining, rng, routing
from instep.torch.comms import Comms
from instep.torch.control import Control
from instep.torch.followers import Followers
from instep.torch.gate import Gate
from instep.torch.holding import RankHolding
from instep.torch.ledger import Ledger
from instep.torch.receiving import Receiving
from instep.torch.reset import Modes
from instep.torch.state import RankState
from instep.torch.tape import Tape
from instep.torch.unwind import Unwinder

if TYPE_CHECKING:
    from instep.engine import Engine

_HOST = "127.0.0.1"


class LocalRank:
    """Everything of one birth of a rank. The constructor meets the agent, ``join`` the other ranks."""

    def __init__(self, environment: Environment, *, step: int) -> None:
        channel = environment.channel
        if channel is None:
            raise InstepError("no channel to an agent; start the script with `instep run`")
        self.rank, self.world_size, self.local_rank = environment.rank, environment.world_size, environment.local_rank
        self._birth = environment.birth
        self.incidents = self._delivered = 0
        self._mark = (0, 0)
        fresh = self._birth > 0
        self.board = Board()
        self.board.current = self.board.target = self.board.acknowledged = -1 if fresh else 0
        header = Header(channel.record)
        self.standing = Standing(header, step=step, status=Status.FRESH if fresh else Status.CLEAN)
        self.standing.begin()
        self.barrier = NodeBarrier(channel.barrier, rank=self.local_rank, size=self.world_size)
        self.state = RankState(channel.record, rank=self.rank, world_size=self.world_size)
        self.gate = Gate(self.board, header, Tape(channel.setup), loopback=fresh)
        self.state.watch(self.gate)
        self.control = Control(self.board, header)
        self._link = Link(channel.control)
        self._link.start(self.control.on_message, self.control.on_beat)
        told = joining.first_words(self.board)
        self.config, self._secret = told.config, told.secret

    def join(self, engine: "Engine") -> None:
        """Start the plugins, meet the other ranks, make the world, and watch over the engine's block from now on."""
        self._engine = engine
        self.plugins: LoadedPlugins = prepared(json.dumps(dict(self.config.plugins)))
        self.comms = Comms(self.board, self.gate, self.plugins, rank=self.rank, world_size=self.world_size, tell=self.tell)
        job = Job(self.rank, self.world_size, self.local_rank, self._birth, _HOST, self._secret, RankHolding(self.state, self.standing))
        self._address = joining.start_plugins(self.plugins, job)
        first = routing.first_group(self.world_size, self.config.backend)
        self._welcomed(joining.say_hello(self.board, self.comms, self._address, first=first, tell=self.tell))
        self._routing = routing.Routing(self.gate)
        routing.make_world(self.gate, rank=self.rank, size=self.world_size, backend=self.config.backend)
        self.gate.recording = not self.gate.loopback
        self.unwinder = Unwinder(self.board)
        self.lifecycle = Lifecycle(self.board, self.plugins, self, self.tell, time.monotonic)
        self.followers = Followers(self.plugins, self.board, lambda: self.comms.book)
        self.control.watch(self.lifecycle, self.unwinder, self.gate)

    def _welcomed(self, welcome: Welcome) -> None:
        self.once, self.finished = welcome.once, welcome.finished
        self.injections = Injections(welcome.injections, self.rank, self._birth, self.tell)
        self._uninstall = self.injections.install(lambda: self.standing.step if self._engine.running else None)
        self.gate.point, self.gate.expects = self.point, self.expects
        if (drill := self.config.drill) is not None:
            rng.seed_all(drill.seed * 1009 + self.rank)
            self.state.ledger = Ledger(drill.directory, self.rank)
            self.gate.observer = self.state.ledger.observe
        self.point("setup")

    def withdraw(self) -> None:
        """Leave before anything was set up (``enabled = false``)."""
        self._link.close()

    def close(self) -> None:
        """Give everything back."""
        self.control.close()
        self.unwinder.close()
        self._uninstall()
        self.state.close()
        self.gate.close()
        self.followers.close()
        self._routing.close()
        self._link.close()

    def tell(self, message: Message) -> None:
        """Send a message to the agent."""
        self._link.send(message)

    def point(self, name: str) -> None:
        """Let an injection fire."""
        if self.injections:
            self.injections.at(name, self.standing.step)

    def expects(self, name: str) -> bool:
        """Whether an injection fires at this point."""
        return bool(self.injections) and self.injections.expects(name, self.standing.step)

    def delivered(self) -> None:
        """A batch is about to be delivered: the third place where an interruption lands."""
        if self._engine.running:
            self.gate.outside_body("a batch of a protected loader")
            self.gate.check()
            self._delivered += 1
            self.standing.header.put("deliveries", self._delivered)
            self.point("loader")

    def begin(self) -> int:
        """At the first block: the step to begin with, after an earlier run if there was one."""
        return joining.begin(self)

    def agree(self) -> None:
        """Before the first block: fix layouts, and prove that all ranks start from equal shared state."""
        self.state.complete()
        if self.world_size > 1:
            self.state.agree(self.comms.gather)
        self.standing.header.put("joined", 0)

    def mark_groups(self) -> None:
        """Remember which groups exist when a block starts."""
        self._mark = (len(self.gate.handles), routing.count())

    def unmake_groups(self) -> None:
        """Groups made inside the block are gone when it is left or repeated."""
        handles, counter = self._mark
        if handles:
            routing.unmake(self.gate, handles=handles, counter=counter)

    def unwound(self, modes: Modes) -> None:
        """Clean up after the block was cut."""
        self.gate.body = False
        self.unwinder.reset()
        self.unmake_groups()
        self.state.cut(modes)

    def settle(self) -> None:
        """Lay communicators to rest and drop live iterators."""
        self.gate.bury()
        self.state.stop_loaders()

    def vote(self, incarnation: int) -> Vote:
        """What this rank holds now. A vote from inside a commit leaves out groups made in the block: they go before it is repeated."""
        groups, standing = self.comms.among(self.gate.handles[: self._mark[0] or None]), self.standing
        self.state.complete()
        return Vote(
            rank=self.rank,
            birth=self._birth,
            incarnation=incarnation,
            block=standing.block,
            step=standing.step,
            status=Status.UNPUB if standing.unpublished and standing.status is Status.CLEAN else standing.status,
            groups=groups,
            address=self._address,
            shards={share.name: share.replicas for share in self.state.shared.shares()},
            copies=self.followers.copies(),
            notes={**self.comms.announce(groups), **self.state.notes()},
        )

    def meanwhile(self, check: Callable[[], None], planned: Callable[[], bool]) -> None:
        """Digest what this rank holds: the comparison after the recovery will ask for it."""
        if self.standing.status is Status.CLEAN:
            self.state.digest_ahead(check, planned)

    def phase(self, name: str) -> None:
        """Show the phase in the record."""
        self.standing.at(State.RECOVERY, operation=name)

    def requests(self, plan: Plan) -> Sequence[CommsRequest]:
        """The groups to connect, one request a backend, in the order of the vote."""
        self.point("connect")
        self.standing.must_hold(plan, self.rank)
        return self.comms.requests(plan.book)

    def install(self, request: CommsRequest, answer: tuple[str, object] | None) -> None:
        """Put the new communicators into their handles."""
        self.comms.install(request, self.comms.made(request, answer))

    def recovery(self, plan: Plan) -> Recovery:
        """The argument of the later phases; handles are live from here on."""
        self.gate.go_live()
        self.state.adopt(plan)
        return Recovery(
            plan=plan,
            rank=self.rank,
            fresh=self.standing.status is Status.FRESH,
            torn=self.standing.status is Status.TORN,
            secret=self._secret,
            shards=tuple(Receiving(share, self._tearing) for share in self.state.shared.shares()),
            check=self.board.checker(plan.incarnation),
            gather=self.comms.gather,
            point=self.point,
            deadline=time.monotonic() + self.config.deadlines.restore,
        )

    @property
    def publishes(self) -> bool:
        """Whether an adapter derives parameters from shards."""
        return bool(self.state.adapters)

    def publish(self) -> None:
        """What is derived from restored shards; see ``Adapter.publish``."""
        self.point("publish")
        self.state.publish()

    def reload(self, step: int) -> None:
        """Private state back from the record."""
        with self.unwinder.library():
            self.state.private.load(step)

    def in_step(self, plan: Plan) -> None:
        """The recovery succeeded."""
        self.standing.moved_to(plan.block, plan.step)
        self.standing.header.put("joined", plan.incarnation)
        self.incidents += 1
        self.mark_groups()
        self._engine.rejoined()
        self.followers.keep(plan.step)

    def _tearing(self) -> None:
        if self.standing.status is not Status.FRESH:
            self.standing.status = Status.TORN
