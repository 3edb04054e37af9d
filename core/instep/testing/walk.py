"""Leads the ranks of a test's world through the lifecycle, as an agent would, and keeps what every hook answered."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from instep.config import Config
from instep.errors import InstepError
from instep.model import Address, AddressBook, Group, Json, Plan, Role
from instep.testing import samples
from instep.testing.world import Answer, World

ACTS = "instep.testing.acts"
NEEDS_TORCH = frozenset({"reinit_comms", "restore_state", "verify"})
_LIMITS = Config()
DEADLINES: Mapping[str, float] = {
    "environment": _LIMITS.watchdog.stall,
    "start": _LIMITS.deadlines.spawn,
    "begin": 30.0,
    "announce": _LIMITS.deadlines.acknowledge,
    "committed": _LIMITS.watchdog.stall,
    "keep": _LIMITS.watchdog.stall,
    "detect": _LIMITS.watchdog.stall,
    "quiesce": _LIMITS.deadlines.acknowledge,
    "plan": _LIMITS.watchdog.stall,
    "reinit_comms": _LIMITS.deadlines.connect,
    "restore_state": 30.0,
    "resume_data": 30.0,
    "verify": 30.0,
    "report": _LIMITS.watchdog.stall,
    "close": _LIMITS.deadlines.shutdown,
}
"""Seconds that one call of each hook may take in a contract: the defaults of a job, shorter for the phases that move data."""


@dataclass(frozen=True)
class Line:
    """One call of one hook on one rank, and what came of it."""

    hook: str
    rank: int
    answer: Answer

    @property
    def said(self) -> Mapping[str, Json]:
        """What the hook said: ``none``, ``wrong``, ``mapping``, ``receipt``."""
        return self.answer.value if isinstance(self.answer.value, dict) else {}

    @property
    def none(self) -> bool | None:
        """Whether it answered ``None``; ``None`` when it did not return."""
        return bool(self.said.get("none")) if self.answer.ok else None


class Walk:
    """One pass through the lifecycle; ``script`` holds all calls in order. Hooks that the plugin lacks are passed over."""

    def __init__(self, world: World, hooks: Collection[str], *, name: str, deadlines: Mapping[str, float], backend: str = "gloo") -> None:
        self.world, self.backend, self.name = world, backend, name
        self._hooks, self._deadlines = hooks, {**DEADLINES, **deadlines}
        self.script: list[Line] = []
        self.incarnation = 0
        self.everyone = samples.world_group(world.size, backend)
        self._ports: dict[int, Mapping[str, Json]] = {}

    def has(self, *hooks: str) -> bool:
        """Whether the plugin implements one of these hooks."""
        return any(hook in self._hooks for hook in hooks)

    def call(
        self,
        hook: str,
        ranks: Sequence[int] | None = None,
        *,
        each: Callable[[int], Mapping[str, Json]] = lambda _: {},
        meanwhile: Callable[[], None] | None = None,
        **given: Json,
    ) -> list[Line]:
        """Call a hook on ranks at once; nothing if the plugin lacks it, or a rank has no process any more."""
        ranks = self.world.living if ranks is None else [rank for rank in ranks if rank in self.world.living]
        if hook not in self._hooks or not ranks:
            return []
        seconds = self._deadlines[hook]
        answers = self.world.together(ranks, f"{ACTS}:call", seconds=seconds, each=each, meanwhile=meanwhile, hook=hook, **given)
        lines = [Line(hook, rank, answers[rank]) for rank in ranks]
        self.script += lines
        return lines

    def begin(self) -> None:
        """A job from its start: every rank has a process and a new instance."""
        self.incarnation = 0
        for rank in range(self.world.size):
            if rank not in self.world.living:
                self.world.replace(rank)
        self.start()

    def start(self, ranks: Sequence[int] | None = None) -> None:
        """New instances on these ranks, started."""
        ranks = self.world.living if ranks is None else ranks
        for rank, answer in self.world.together(ranks, f"{ACTS}:renew").items():
            if not answer.ok:
                raise InstepError(
                    f"rank {rank} of the test's world cannot make an instance of '{self.name}': it {answer}. Its class must be "
                    "importable by name in another process (not defined in the test itself), and its settings complete"
                )
        for line in self.call("start", ranks):
            mapping = line.said.get("mapping")
            self._ports[line.rank] = mapping if isinstance(mapping, dict) else {}

    def book(self, groups: Sequence[Group]) -> Json:
        """The address book of this incarnation, with what every member announced for its groups."""
        notes: list[Mapping[str, Json]] = [{} for _ in range(self.world.size)]
        for line in self.call("announce", each=lambda rank: {"groups": dumped(groups, rank)}):
            mapping = line.said.get("mapping")
            notes[line.rank] = {self.name: mapping} if isinstance(mapping, dict) else {}
        addresses = tuple(
            Address(
                rank=rank,
                birth=self.world.births[rank],
                host=samples.HOST,
                ports={k: int(str(v)) for k, v in self._ports.get(rank, {}).items()},
            )
            for rank in range(self.world.size)
        )
        book: Json = AddressBook(incarnation=self.incarnation, addresses=addresses, notes=tuple(notes)).model_dump(mode="json")
        return book

    def connect(self, *groups: Group, ranks: Sequence[int] | None = None, meanwhile: Callable[[], None] | None = None) -> list[Line]:
        """Announce and connect groups (the world unless given) on their members, of which ``ranks`` take part."""
        groups = groups or (self.everyone,)
        members = sorted({rank for group in groups for rank in group.ranks})
        book = self.book(groups)
        taking = [rank for rank in members if ranks is None or rank in ranks]
        return self.call("reinit_comms", taking, each=lambda rank: {"groups": dumped(groups, rank)}, meanwhile=meanwhile, book=book)

    def quiesce(self, ranks: Sequence[int] | None = None) -> None:
        """Open the next incarnation: twice from another thread, as the control thread does, and once while acknowledging."""
        self.incarnation += 1
        for thread, acknowledging in ((True, False), (True, False), (False, True)):
            self.call("quiesce", ranks, incarnation=self.incarnation, thread=thread, acknowledging=acknowledging)
        if self.has("reinit_comms"):
            self.world.together(self.world.living, f"{ACTS}:abandon", seconds=2 * DEADLINES["quiesce"], seconds_each=DEADLINES["quiesce"])

    def plan(self, *restoring: int) -> Json:
        """The plan of this incarnation, in which the ``restoring`` ranks draw from all others."""
        size = self.world.size
        roles = tuple(Role.RESTORE if rank in restoring else Role.KEEP for rank in range(size))
        donors = tuple(rank for rank in range(size) if rank not in restoring) if restoring else ()
        book = AddressBook.model_validate(self.book([self.everyone]))
        plan = Plan(incarnation=self.incarnation, block=0, step=samples.STEP, roles=roles, donors={"replica": donors}, book=book)
        out: Json = plan.model_dump(mode="json")
        return out

    def recover(self, *restoring: int, ranks: Sequence[int] | None = None) -> None:
        """The phases behind the communicators, on all ranks."""
        plan = self.plan(*restoring)
        for hook in ("restore_state", "resume_data", "verify"):
            self.call(hook, ranks, plan=plan, each=lambda rank: {"fresh": rank in restoring})

    def whole(self) -> None:
        """Everything once: start, steps, a recovery of the last rank, another one in which nobody is lost, a report, and the end."""
        last = self.world.size - 1
        self.call("environment", [0])
        self.start()
        if self.has("restore_state", "verify"):
            for rank in self.world.living:
                self.world.do(rank, f"{ACTS}:hold", steps=0 if rank == last and self.has("restore_state") else samples.STEP)
        self.connect()
        self.call("begin", plan=self.plan(*range(self.world.size)))
        self.call("committed", step=samples.STEP)
        self.call("keep", step=samples.STEP, incarnation=self.incarnation)
        self.call("detect")
        self.quiesce()
        self.call("plan", [0], incarnation=self.incarnation)
        self.connect()
        self.recover(last)
        self.quiesce()
        self.connect()
        self.recover()
        self.call("report", [0])
        self.call("detect")
        self.call("close")


def dumped(groups: Sequence[Group], rank: int) -> list[Json]:
    """The groups of a rank, as JSON."""
    return [group.model_dump(mode="json") for group in groups if rank in group.ranks]
