"""A simulated worker process: its threads, its line to the agent, and the ways in which it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from greenlet import GreenletExit, getcurrent

from instep.agent.records import Header, Progress, State
from instep.agent.watchdog import Vitals
from instep.errors import Interrupted
from instep.messages import Message
from instep.testing.simulator.clock import Task, here
from instep.testing.simulator.model import Slots
from instep.testing.simulator.schedule import SCRIPT, Trouble

if TYPE_CHECKING:
    from instep.testing.simulator.world import World

_WORDS = ("block", "step", "collectives", "deliveries", "frame", "beat", "waiting", "sequence")

_EXIT = 0.02
"""Seconds that an interpreter takes at least to end after an exception."""

_ENDLESS = 20000
"""Places that no sound rank passes in one life."""

_PAUSE = 0.05
"""Seconds that a pause lasts at most: many steps."""


class Troubled(RuntimeError):  # noqa: N818 - a fault on purpose, not an error of anybody
    """What a trouble of kind ``raise`` or ``hook`` raises."""


class Words(Header):
    """A record's progress words in plain memory, with the interface of ``instep.agent.records.Header``."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = dict.fromkeys(_WORDS, 0) | {"state": State.BORN, "joined": -1}
        self._text = ""

    def put(self, word: str, value: int) -> None:
        """Store one word."""
        self._kept[word] = value

    def get(self, word: str) -> int:
        """Read one word."""
        return self._kept[word]

    def operation(self, text: str) -> None:
        """Name what main waits in."""
        self._text = text

    def progress(self) -> Progress:
        """The present progress."""
        kept = self._kept
        return Progress(state=State(kept["state"]), operation=self._text, joined=kept["joined"], **{word: kept[word] for word in _WORDS})


@dataclass
class Memory:
    """What a rank keeps over its births."""

    words: Words = field(default_factory=Words)
    slots: Slots = field(default_factory=Slots)

    def new_birth(self) -> None:
        """The predecessor is dead: its progress stays, but nobody stands where it stood."""
        self.words.put("state", State.BORN)
        self.words.put("waiting", 0)
        self.words.operation("")


class Process:
    """One birth of a rank. ``local`` and ``interruptible`` are set by what runs in it."""

    def __init__(self, world: "World", rank: int, birth: int, main: Callable[["Process"], None]) -> None:
        self.world, self.rank, self.birth, self.life = world, rank, birth, world.life
        self.begun = self.buried = False
        self._main, self._unheard = main, list[Message]()
        self.clock, self.memory = world.clock, world.memories[rank]
        self.dead = self.stopped = self.hung = self.corrupt = False
        self.code: int | None = None
        self.slow = 1.0
        self.failing: set[str] = set()
        self.incarnation = -1
        self._moves = 0
        self.receive: Callable[[Message], None] | None = None
        self.local: object = None
        self.interruptible: Callable[[], bool] = lambda: False
        self._tasks: list[Task] = []

    def begin(self) -> None:
        """Start the main thread."""
        self.begun = True

        def body() -> None:
            try:
                self._main(self)
                self.die(0)
            except SystemExit as error:
                self.die(error.code if isinstance(error.code, int) else 1)
            except (GreenletExit, Interrupted):
                raise
            except Exception as error:  # noqa: BLE001 - like an interpreter, which ends with code 1
                self.world.trace(f"rank {self.rank} ends: {type(error).__name__}: {error}")
                here().park(_EXIT + self.clock.soon(_EXIT))
                self.die(1)

        self.thread(body)

    def hears(self, message: Message) -> None:
        """A message of the agent; what comes before there is a reader waits for it."""
        if self.receive is None:
            self._unheard.append(message)
        else:
            self.receive(message)

    def reader(self, receive: Callable[[Message], None]) -> None:
        """From now on messages are read."""
        self.receive = receive
        for message in self._unheard:
            receive(message)

    def thread(self, run: Callable[[], None]) -> None:
        """Start one more thread."""
        self._tasks.append(self.clock.task(run, self))

    def tell(self, message: Message) -> None:
        """Send a message to the agent."""
        self.place("tell")
        self.world.agent.hear(self, message)

    def place(self, name: str) -> None:
        """A place where anything may happen to this rank: trouble, or other ranks that overtake it."""
        world = self.world
        self._moves += 1
        if self._moves > _ENDLESS:
            world.checks.never(f"rank {self.rank} goes round in circles at {name}")
        for trouble in world.due(self.rank, name):
            self._befall(trouble, name)
        self.idle()
        if name in SCRIPT and self.interruptible():
            raise Interrupted("by signal")

    def idle(self) -> None:
        """Perhaps let others go first."""
        chance = self.clock.random
        if self.slow > 1.0 or chance.random() < self.world.schedule.pace:
            here().park(chance.random() * 0.0005 * self.slow)

    def fails(self, hook: str) -> None:
        """Raise in a hook that is to fail once."""
        if hook in self.failing:
            self.failing.discard(hook)
            self.world.struck(Trouble("hook", self.rank, hook=hook))
            raise Troubled(f"plugin fails in {hook}")

    def die(self, code: int | None, *, silent: bool = False) -> None:
        """End now; its peers are told by their connections, unless ``silent``. Does not return to a thread of this process."""
        if not self.dead:
            self.dead, self.code = True, code
            self._end_threads()
            if not silent and self.incarnation >= 0:
                self.world.network.shut(self.rank, self.incarnation)
            self.world.agent.died(self)
        task = getcurrent()
        if isinstance(task, Task) and task.owner is self:
            task.park(None)

    def stop(self) -> None:
        """Freeze all threads, as SIGSTOP does."""
        self.stopped = True
        self._end_threads()
        here().park(None)

    def nudge(self) -> None:
        """News for main, whatever it waits for; waits look up once more."""
        self._tasks[0].wake()

    def vitals(self) -> Vitals:
        """What the machine would tell: CPU time moves from place to place."""
        return Vitals(cpu=self._moves, stopped=self.stopped)

    def _end_threads(self) -> None:
        for task in self._tasks:
            task.gone = True

    def _befall(self, trouble: Trouble, name: str) -> None:
        if trouble.kind == "hook":
            self.failing.add(trouble.hook)
            return
        self.world.struck(trouble)
        match trouble.kind:
            case "kill" | "vanish":
                self.die(-9, silent=trouble.kind == "vanish")
            case "exit":
                self.die(1)
            case "raise":
                raise Troubled(f"injected at {name}")
            case "corrupt":
                self.corrupt = True
            case "reset":
                self.world.network.shut(self.rank, self.incarnation)
            case "detect" | "server":
                self.world.agent.trouble(trouble)
            case _:
                self._delay(trouble, name)

    def _delay(self, trouble: Trouble, name: str) -> None:
        match trouble.kind:
            case "hang":
                self._hang()
            case "spin":
                self._spin(name)
            case "stop":
                self.stop()
            case "slow":
                self.slow = 100.0
            case "pause":
                here().park(self.clock.soon(_PAUSE))

    def _hang(self) -> None:
        self.hung = True
        while True:
            here().park(None)

    def _spin(self, name: str) -> None:
        self.hung = True
        while name not in SCRIPT or not self.interruptible():
            here().park(0.05)
        self.hung = False
