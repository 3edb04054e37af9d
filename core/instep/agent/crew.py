"""The processes of a job: carries out what the coordinator decides about them, and tells it what becomes of them."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from instep.agent import barrier
from instep.agent import events as ev
from instep.agent.launch import Launch
from instep.agent.logs import Logs
from instep.agent.nursery import Nursery
from instep.agent.records import Progress
from instep.agent.spawner import Server, bury_unreaped
from instep.agent.task import Fds, Task
from instep.agent.workers import Line, Memory, Worker
from instep.messages import Message

_ASK, _UNREAPED = 2, 20
"""Ticks after which a dead worker whose end the fork server does not tell is looked at, and then given up as unknown."""
_DUMP = 2
"""Ticks that a hung rank gets to write its stacks."""

_NUMBERS = count(1)
"""Numbers of requests, never used twice in a process, since a fork server may answer one of an earlier job."""


@dataclass
class _Request:
    """A process that was asked for and does not exist yet."""

    worker: Worker
    task: Task
    ticks: int = 0


class Crew:
    """All ranks of a job. ``feed`` takes events, ``greet`` is the first message on each line, ``say`` a line for the console."""

    def __init__(
        self,
        launch: Launch,
        logs: Logs,
        *,
        server: Server | None,
        feed: Callable[[ev.Event], None],
        greet: Message,
        say: Callable[[str], None],
    ) -> None:
        self._launch, self._logs, self._feed, self._greet, self._say = launch, logs, feed, greet, say
        self._loop = asyncio.get_running_loop()
        self._nursery = Nursery(launch, self, lent=server, say=say)
        self._requests: dict[int, _Request] = {}
        self._dumping: list[tuple[Worker, int]] = []
        self._clearing = False
        self._opening: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.memories = [Memory(rank) for rank in range(self._launch.nproc)]
        self._barrier = barrier.create(self._launch.nproc)
        self.workers: dict[int, Worker] = {}
        self._port = self._launch.free_port()

    def _forget(self) -> None:
        for memory in self.memories:
            memory.close()
        for fd in self._barrier:
            os.close(fd)

    async def open(self) -> None:
        """Be ready to start processes."""
        await self._nursery.open()

    # ---- what the coordinator wants

    def spawn(self, rank: int, birth: int, restart: int) -> None:
        """Start a birth of a rank; its predecessor is dead."""
        if birth:
            self.memories[rank].new_birth()
        task = self._launch.task(rank, birth, restart=restart, port=self._port)
        self._request(_Request(self._worker(rank, birth), task))

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the present birth of a rank."""
        self.workers[rank].line.send(message)

    def kill(self, rank: int, birth: int, why: str, *, dump: bool) -> None:
        """Kill a birth, after it has written its stacks to its log if ``dump``."""
        worker = self.workers[rank]
        if worker.birth != birth:
            return
        if dump:
            worker.signal(signal.SIGUSR2)
            self._dumping.append((worker, _DUMP))
        else:
            worker.kill(why)

    def restart(self) -> None:
        """Kill every process; ``Cleared`` follows when none is left, and a new start has new lines, records and a new port."""
        self._clearing = True
        for worker in self.workers.values():
            worker.kill("the whole job starts again")
        self._cleared()

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to every rank."""
        for worker in self.workers.values():
            worker.signal(signum)

    @property
    def empty(self) -> bool:
        """Whether no process of the job is left."""
        return not self._requests and all(w.dead for w in self.workers.values())

    def progress(self, rank: int) -> Progress:
        """The progress words of a rank."""
        return self.memories[rank].progress()

    def running(self) -> Sequence[Worker]:
        """The births that are not known to be dead."""
        return [w for w in self.workers.values() if w.pid and not w.dead]

    def drain(self) -> None:
        """Handle everything that was sent so far."""
        for worker in list(self.workers.values()):
            if not worker.dead:
                worker.line.drain()

    def tick(self) -> None:
        """Count one tick of every wait."""
        self._dumping = [(worker, left - 1) for worker, left in self._dumping if not self._fall(worker, left)]
        for worker in self.running():
            if worker.fallen:
                worker.fallen += 1
                if worker.fallen > _ASK:
                    bury_unreaped(worker.pid, self, last=worker.fallen > _UNREAPED)
        late = self._launch.config.deadlines.spawn / self._launch.config.watchdog.tick
        for number, request in list(self._requests.items()):
            request.ticks += 1
            if request.ticks > late and self._nursery.forking:
                self._give_up_on_fork(number, request)

    def close(self) -> None:
        """Leave nothing behind."""
        if self._opening is not None:
            self._opening.cancel()
        for worker in self.workers.values():
            worker.kill("the job is over")
            if worker.pid and not worker.dead:
                self._nursery.reap(worker.pid)
            if not worker.dead:
                worker.buried(self._loop)
        self._nursery.close()
        self._forget()

    # ---- what becomes of processes

    def on_born(self, number: int, pid: int, pidfd: int) -> None:
        """The process for a request exists; one that came too late is killed."""
        request = self._requests.pop(number, None)
        if request is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        worker = request.worker
        worker.born(pid, pidfd)
        worker.watch(self._loop, self._fell)
        self._feed(ev.Born(worker.rank, worker.birth))

    def on_exit(self, pid: int, code: int | None) -> None:
        """A process is dead and how it ended is known: first what it still said, then its death."""
        worker = next((w for w in self.running() if w.pid == pid), None)
        if worker is None:
            return
        worker.line.drain()
        worker.buried(self._loop)
        self._feed(ev.Died(worker.rank, worker.birth, code))
        self._cleared()

    def on_server_lost(self, why: str) -> None:
        """The fork server is gone; what was asked of it will never exist."""
        self._nursery.lost()
        self._abandon(list(self._requests.values()))
        self._requests.clear()
        self._feed(ev.ServerDied(why))
        self._cleared()

    def _fell(self, worker: Worker) -> None:
        if self._nursery.reap(worker.pid) or worker.dead:
            return
        if not self._nursery.forking:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            self.on_exit(worker.pid, None)
        else:
            worker.fallen = 1

    def _worker(self, rank: int, birth: int) -> Worker:
        line = Line(self._loop, lambda messages: self._heard(worker, messages))
        worker = self.workers[rank] = Worker(rank, birth, line)
        line.send(self._greet)
        return worker

    def _heard(self, worker: Worker, messages: Sequence[Message]) -> None:
        for message in messages:
            self._feed(ev.Received(worker.rank, worker.birth, message))

    def _request(self, request: _Request, *, plain: bool = False) -> None:
        rank, number = request.worker.rank, next(_NUMBERS)
        memory, task = self.memories[rank], request.task.seal()
        fds = Fds(task, request.worker.line.theirs.fileno(), memory.record, memory.setup, *self._barrier, self._logs.fd(rank))
        self._requests[number] = request
        self._nursery.spawn(number, request.task, fds, plain=plain)
        os.close(task)

    def _give_up_on_fork(self, number: int, request: _Request) -> None:
        rank, birth = request.worker.rank, request.worker.birth
        self._say(f"the fork server did not start rank {rank} within {self._launch.config.deadlines.spawn} s; starting a plain interpreter")
        del self._requests[number]
        self._abandon([request])
        self._request(_Request(self._worker(rank, birth), request.task), plain=True)

    def _abandon(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            request.worker.buried(self._loop)

    def _fall(self, worker: Worker, left: int) -> bool:
        if left <= 1:
            worker.kill("hung")
        return left <= 1

    def _cleared(self) -> None:
        if not self._clearing or not self.empty:
            return
        self._clearing = False
        self._forget()
        self._begin()
        self._dumping.clear()
        self._opening = self._loop.create_task(self._reopen())

    async def _reopen(self) -> None:
        await self.open()
        self._feed(ev.Cleared())
