"""The agent of a simulated job: the very coordinator and watchdog, over simulated processes and messages."""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from instep.agent import events as ev
from instep.agent.coordinator import Coordinator, Terms
from instep.agent.planner import planner
from instep.agent.records import Progress
from instep.agent.watchdog import Sight, Timing, Watchdog
from instep.messages import Message, encode
from instep.model import Fault, Plan, Unrecoverable, Vote
from instep.testing.simulator.process import Process
from instep.testing.simulator.schedule import Trouble

if TYPE_CHECKING:
    from instep.testing.simulator.world import World

TIMING = Timing(tick=0.25, stall=2.0, moving=40.0, startup=20.0, acknowledge=4.0)
_FORK, _NEWS, _LATE = 0.02, 0.002, 0.5
"""Seconds that a birth, a message, and a message of a bad line take at most."""
_PROMPT, _BUSY = 0.95, 0.05
"""How many messages find a reader that is free, and the seconds that the others wait for one at most."""


class Agent:
    """Carries out what the coordinator decides. ``measure``: count the bytes of all messages too."""

    def __init__(self, world: "World", *, measure: bool) -> None:
        self.world, self._clock = world, world.clock
        self.end: ev.Finish | None = None
        self.processes: dict[int, Process] = {}
        self.sent: Counter[str] = Counter()
        self.bytes = 0
        self.deciding = self.planning = 0.0
        self._encoded: tuple[Message, int] | None = None
        self._measure = measure
        self._detected: list[Fault] = []
        self._lines: dict[object, float] = {}
        self._watchdog = Watchdog(TIMING)
        self._ask = planner(world.no_plugins)
        terms = Terms(world=world.schedule.world, secret="", config={}, max_restarts=world.schedule.max_restarts)
        self.coordinator = Coordinator(terms, planner=self._plan, progress=self._progress)

    def start(self) -> None:
        """Start the job."""
        self._apply(self.coordinator.start(self._clock.now))
        self._clock.after(TIMING.tick, self._tick)

    def hear(self, process: Process, message: Message) -> None:
        """A message leaves a worker."""
        self._count(message)
        key, event = (process.rank, process.birth), ev.Received(process.rank, process.birth, message)
        for moment in self._travel(key):
            self._clock.after(moment, self._feed_from, process, event)

    def died(self, process: Process) -> None:
        """A process is dead: first what it still said, then its death."""
        left = max(0.0, self._lines.get((process.rank, process.birth), 0.0) - self._clock.now)
        self._clock.after(left + self._clock.soon(_NEWS * 2), self._buried, process)

    def trouble(self, trouble: Trouble) -> None:
        """Something goes wrong in the agent itself."""
        if trouble.kind == "server":
            self._clock.after(0.0, self._server_died)
        else:
            detail = f"a detector blames rank {trouble.rank}"
            self._detected.append(
                Fault(
                    kind="plugin", ranks=(trouble.rank,), detail=detail, detected_by="simulator", at=self._clock.now, signature="detected"
                )
            )

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.end is not None

    # ---- events and actions

    def _feed_from(self, process: Process, event: ev.Event) -> None:
        if process.world.life == process.life:
            self._feed(event)

    def _feed(self, event: ev.Event) -> None:
        if not self.over:
            self.world.trace("agent hears", event)
            began = perf_counter()
            actions = self.coordinator.handle(event, self._clock.now)
            self.deciding += perf_counter() - began
            self._apply(actions)

    def _apply(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            if not isinstance(action, ev.Send):
                self.world.trace("agent does", action)
            match action:
                case ev.Send(rank, message):
                    self._send(rank, message)
                case ev.Spawn(rank, birth):
                    self._spawn(rank, birth)
                case ev.Kill(rank, birth):
                    self._clock.after(self._clock.soon(0.1), self._kill, self.processes[rank], birth)
                case ev.Restart():
                    self._restart()
                case ev.Wake(seconds):
                    self._clock.after(seconds, self._feed, ev.Woken())
                case ev.Report(incident):
                    self.world.checks.reported(incident)
                case ev.Finish():
                    self.end = action

    def _send(self, rank: int, message: Message) -> None:
        self._count(message)
        process = self.processes[rank]
        for moment in self._travel((process, "down")):
            self._clock.after(moment, self._deliver, process, message)

    def _deliver(self, process: Process, message: Message) -> None:
        if not (process.dead or process.stopped):
            process.hears(message)

    def _travel(self, line: object) -> Sequence[float]:
        """When a message arrives, in seconds from now: in order on a good line; never, late or twice on a bad one."""
        chance = self._clock.random
        soon = self._clock.soon(_NEWS if chance.random() < _PROMPT else _BUSY)
        if self.world.schedule.lossy and (luck := chance.random()) < 0.12:
            self.world.mishap()
            moments: tuple[float, ...] = (
                () if luck < 0.03 else (soon, self._clock.soon(_LATE)) if luck < 0.07 else (self._clock.soon(_LATE),)
            )
            return moments  # a process may be known to be dead before the last of them is heard
        if self.world.schedule.lossy:
            return (soon,)
        arrival = max(self._lines.get(line, 0.0), self._clock.now + soon)
        self._lines[line] = arrival
        return (arrival - self._clock.now,)

    def _spawn(self, rank: int, birth: int) -> None:
        if birth:
            self.world.memories[rank].new_birth()
        process = self.processes[rank] = self.world.process(rank, birth)
        self._clock.after(self._clock.soon(_FORK), self._born, process)

    def _born(self, process: Process) -> None:
        if not process.dead:
            process.begin()
            self._feed(ev.Born(process.rank, process.birth))

    def _kill(self, process: Process, birth: int) -> None:
        if process.birth == birth:
            process.die(-9)

    def _buried(self, process: Process) -> None:
        if process.life == self.world.life and self.processes[process.rank] is process:
            process.buried = True
            self._feed(ev.Died(process.rank, process.birth, process.code))
            self._cleared()

    def _server_died(self) -> None:
        self._feed(ev.ServerDied("the fork server died"))

    def _restart(self) -> None:
        self._watchdog = Watchdog(TIMING)
        for process in self.processes.values():
            process.die(-9)
        self._clock.after(0.0, self._cleared)

    def _cleared(self) -> None:
        if self.coordinator.job.clearing and all(p.buried for p in self.processes.values()) and not self.over:
            self.world.begin_life()
            self._feed(ev.Cleared())

    # ---- what the coordinator asks

    def _progress(self, rank: int) -> Progress:
        return self.world.memories[rank].words.progress()

    def _plan(self, votes: Sequence[Vote]) -> Plan | Unrecoverable:
        began = perf_counter()
        plan = self._ask(votes)
        self.planning += perf_counter() - began
        if self._measure:
            return plan
        again = self._ask(self._clock.random.sample(votes, len(votes)))
        self.world.checks.planned(votes, plan, again)
        return plan

    # ---- time

    def _tick(self) -> None:
        job = self.coordinator.job
        if self.over:
            return
        if not job.clearing and not job.plain:
            sights = self._sights()
            for verdict in self._watchdog.tick(sights, absent=job.left() - len(sights)):
                self._feed(verdict)
        for fault in self._detected:
            self._feed(ev.Detected(fault))
        self._detected.clear()
        self.world.checks.in_time()
        self._clock.after(TIMING.tick, self._tick)

    def _sights(self) -> list[Sight]:
        job, owing, sights = self.coordinator.job, self.coordinator.job.owing(), []
        for rank, process in self.processes.items():
            member = job.members[rank]
            if member.ended or process.dead or not process.begun:
                continue
            voted = member.vote is not None and not job.life.planned
            progress, vitals, greeted = self._progress(rank), process.vitals(), member.hello is not None
            owes = rank in owing
            sights.append(Sight(rank, process.birth, progress, vitals, greeted, member.joined, owes_vote=owes, voted=voted))
        return sights

    def _count(self, message: Message) -> None:
        self.sent[message.t] += 1
        if self._measure:
            if self._encoded is None or self._encoded[0] is not message:
                self._encoded = message, len(encode(message))
            self.bytes += self._encoded[1]
