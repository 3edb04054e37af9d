"""The agent: runs one job on this machine, from its first process to its exit code. ``run`` is the whole interface.

The coordinator decides, the crew holds the processes, the watchdog judges silence; this module only connects them, in one event loop.
"""

import asyncio
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from instep import plugins
from instep.agent import events as ev
from instep.agent.console import Console, Status
from instep.agent.coordinator import Coordinator, Terms
from instep.agent.crew import Crew
from instep.agent.environment import equipped, serving
from instep.agent.launch import Launch, Outcome
from instep.agent.logs import Logs
from instep.agent.planner import planner
from instep.agent.reports import Reports
from instep.agent.spawner import Server
from instep.agent.stopped import Stopped
from instep.agent.watchdog import Sight, Timing, Watchdog
from instep.messages import Setup
from instep.model import Fault

__all__ = ["Launch", "Outcome", "Server", "run", "serving"]

AGENT_HOOKS = ("detect", "plan", "report")
_FINISH_GRACE, _INTERRUPT_GRACE = 2.0, 5.0


def run(launch: Launch, *, server: Server | None = None) -> Outcome:
    """Run a job to its end. Raises ``ConfigError`` or ``PluginError`` before anything is started.

    ``server`` is a fork server that outlives the job, for callers that run several jobs like this one; see ``serving``.
    """
    launch = equipped(launch)
    loaded = plugins.load(launch.config, implementing=AGENT_HOOKS)
    reports = Reports(launch.report_dir, loaded, world=launch.nproc, config=launch.config)
    logs = Logs(launch.log_dir, launch.nproc)
    try:
        return asyncio.run(_Agent(launch, loaded, reports, logs).run(server))
    finally:
        logs.close()


class _Agent:
    """One run."""

    def __init__(self, launch: Launch, loaded: plugins.LoadedPlugins, reports: Reports, logs: Logs) -> None:
        self._launch, self._plugins, self._reports, self._logs = launch, loaded, reports, logs
        self._tick_seconds = launch.config.watchdog.tick
        self._watchdog = self._new_watchdog()
        shown = None if launch.quiet else sys.stdout, None if launch.quiet else sys.stderr
        self._console = Console(logs, launch.nproc, out=shown[0], err=shown[1], hidden=launch.hidden)
        self._stopped = Stopped(tick=self._tick_seconds, stall=launch.config.watchdog.stall)
        self._end: tuple[int, str] | None = None
        self._grace: int | None = None
        self._interrupts = 0
        self._steps = 0

    def _new_watchdog(self) -> Watchdog | None:
        watch, acknowledge = self._launch.config.watchdog, self._launch.config.deadlines.acknowledge
        return Watchdog(Timing(watch.tick, watch.stall, watch.moving, watch.startup, acknowledge)) if watch.enabled else None

    async def run(self, server: Server | None) -> Outcome:
        """Start, lead and end the job."""
        config, launch = self._launch.config, self._launch
        secret, document = secrets.token_hex(32), config.model_dump(mode="json")
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._failed)
        greet = Setup(config=document, secret=secret)
        self._crew = Crew(launch, self._logs, server=server, feed=self._feed, greet=greet, say=self._console.say)
        terms = Terms(
            world=launch.nproc,
            secret=secret,
            config=document,
            max_restarts=launch.max_restarts,
            recoveries=config.limits.recoveries_without_commit,
            same_fault=config.limits.same_fault,
            injections=tuple(launch.injections),
        )
        self._coordinator = Coordinator(terms, planner=planner(self._plugins), progress=self._crew.progress)
        self._signals()
        work = self._loop.create_task(self._work())
        try:
            await asyncio.wait([work, self._done], return_when=asyncio.FIRST_COMPLETED)
            for finished in (f for f in (work, self._done) if f.done()):
                finished.result()
        finally:
            work.cancel()
            self._crew.close()
            self._signals(taken=False)
            self._console.end()
        return self._outcome()

    def _outcome(self) -> Outcome:
        code, message = self._end or (70, "the agent ended early")
        job = self._coordinator.job
        fired = {i.id for i in self._launch.injections} - {i.id for i in job.injections}
        self._console.say(message)
        self._console.end()
        return Outcome(code, message, self._reports.incidents, tuple(sorted(fired)), self._steps)

    async def _work(self) -> None:
        if self._launch.announce:
            self._console.say(self._launch.headline)
        await self._crew.open()
        if self._end is None:
            self._apply(self._coordinator.start(time.monotonic()))
        while True:
            await asyncio.sleep(self._tick_seconds)
            self._tick()

    # ---- events and actions

    def _feed(self, event: ev.Event) -> None:
        if self._end is None:
            self._tell(event)
            self._apply(self._coordinator.handle(event, time.monotonic()))
        self._ended()

    def _apply(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            self._tell(action)
            match action:
                case ev.Send(rank, message):
                    self._crew.send(rank, message)
                case ev.Spawn(rank, birth, restart):
                    self._crew.spawn(rank, birth, restart)
                case ev.Kill(rank, birth, why, dump):
                    self._crew.kill(rank, birth, why, dump=dump)
                case ev.Restart():
                    self._watchdog = self._new_watchdog()
                    self._crew.restart()
                case ev.Wake(seconds):
                    self._loop.call_later(seconds, self._feed, ev.Woken())
                case ev.Report(incident):
                    self._reports.add(incident)
                    self._console.incident(incident)
                case ev.Log(text):
                    self._console.say(text)
                case ev.Finish(code, message, rank):
                    path = None if rank is None else self._logs.path(rank)
                    self._stop(code, message + (f" (its log: {path})" if path and message else ""), signal.SIGTERM, _FINISH_GRACE)

    def _tell(self, what: ev.Event | ev.Action) -> None:
        self._reports.see(what)
        if self._launch.on_event is not None:
            self._launch.on_event(what)

    # ---- time

    def _tick(self) -> None:
        """Everything that was sent while the agent did not run is heard before anyone is judged."""
        self._crew.drain()
        self._crew.tick()
        job = self._coordinator.job
        if self._end is None and not job.clearing and self._crew.workers:
            if self._watchdog is not None and not job.plain:
                sights = self._sights()
                for verdict in self._watchdog.tick(sights, absent=job.left() - len(sights)):
                    self._feed(verdict)
                self._console.say(self._stopped.look(sights, {rank: worker.pid for rank, worker in self._crew.workers.items()}))
            self._detect()
            self._count()
        if self._grace is not None:
            self._grace -= 1
            if self._grace <= 0:
                self._crew.signal(signal.SIGKILL)
        self._console.poll(time.monotonic(), None if job.plain or self._end else Status(self._steps, job.incidents))
        self._ended()

    def _count(self) -> None:
        if not self._coordinator.job.plain:
            self._steps = max(self._steps, self._coordinator.job.floor())

    def _sights(self) -> list[Sight]:
        job = self._coordinator.job
        owing = job.owing()
        sights = []
        for worker in self._crew.running():
            member = job.members[worker.rank]
            if member.ended or worker.fallen:
                continue
            memory = self._crew.memories[worker.rank]
            progress = memory.progress()
            vitals = memory.vitals(worker.pid, progress)
            voted = member.vote is not None and not job.life.planned
            greeted, owes = member.hello is not None, worker.rank in owing
            sights.append(Sight(worker.rank, worker.birth, progress, vitals, greeted, member.joined, owes_vote=owes, voted=voted))
        return sights

    def _detect(self) -> None:
        for name, call in self._plugins.each("detect"):
            try:
                fault = call()
            except Exception as error:  # noqa: BLE001 - a detector that fails is a fault itself, of all ranks
                detail = f"plugin {name}: detect raised {type(error).__name__}: {error}"
                fault = Fault(kind="plugin", ranks=(), detail=detail, detected_by=name, at=time.monotonic(), signature=detail)
            if isinstance(fault, Fault):
                self._feed(ev.Detected(fault))

    # ---- the end

    def _signals(self, *, taken: bool = True) -> None:
        """Take the signals that end a job, or leave them to the system once nothing is left to end in good order.

        Ctrl-C is left first: whoever sees another of them left (no process can see whether Python itself takes SIGINT) may send any.
        """
        main = threading.current_thread() is threading.main_thread()
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM) if main else ():
            if taken:
                self._loop.add_signal_handler(signum, self._signalled, signum)
            else:
                self._loop.remove_signal_handler(signum)

    def _signalled(self, signum: signal.Signals) -> None:
        if signum is not signal.SIGINT:
            self._stop(128 + signum, f"ended by {signum.name}", signal.SIGTERM, self._launch.config.deadlines.shutdown)
            return
        self._interrupts += 1
        self._stop(130, "interrupted", signal.SIGINT, _INTERRUPT_GRACE if self._interrupts == 1 else 0.0)

    def _stop(self, code: int, message: str, signum: signal.Signals, grace: float) -> None:
        """End the job: every rank gets a signal, and after ``grace`` seconds, counted in ticks, is killed."""
        self._count()  # what was committed since the last tick
        self._end = self._end or (code, message)
        ticks = max(0, int(grace / self._tick_seconds))
        self._grace = ticks if self._grace is None else min(self._grace, ticks)
        self._crew.signal(signum if ticks else signal.SIGKILL)
        self._ended()

    def _ended(self) -> None:
        if self._end is not None and self._crew.empty and not self._done.done():
            self._done.set_result(None)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A callback raised: that is a bug of the agent, and ends the job rather than leaving it without one."""
        error = context.get("exception")
        if not self._done.done():
            with suppress(asyncio.InvalidStateError):
                self._done.set_exception(error if isinstance(error, Exception) else RuntimeError(str(context.get("message"))))
