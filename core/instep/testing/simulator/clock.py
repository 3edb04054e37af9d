"""Virtual time: events in the order of a heap, and threads as greenlets that run one at a time until they wait.

One seed decides everything, since nothing here asks the machine for the time and no two threads run at once.
"""

import heapq
import threading
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import cast

from greenlet import GreenletExit, getcurrent, greenlet

from instep.board import Board


class Clock:
    """The present moment in seconds, what will happen later, and the one source of chance."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.over = False
        self.events = 0
        self.hub = getcurrent()
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._number = 0
        self._tasks: list[Task] = []

    def time(self) -> float:
        """The present moment."""
        return self.now

    def after(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Make a call later; calls for one moment are made in the order in which they were asked for."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + seconds, self._number, call, args))

    def soon(self, most: float) -> float:
        """A random wait, up to ``most`` seconds."""
        return self.random.random() * most

    def step(self) -> bool:
        """Let the next thing happen; false when nothing ever will."""
        if not self._heap:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        self.events += 1
        call(*args)
        return True

    def task(self, run: Callable[[], None], owner: object) -> "Task":
        """A thread that starts soon."""
        task = Task(self, run, owner)
        self._tasks.append(task)
        self.after(0.0, task.resume, 0, True)
        return task

    def close(self) -> None:
        """End every thread that is not at its end."""
        self.over = True
        for task in self._tasks:
            if not task.dead:
                task.throw(GreenletExit)
        self._tasks.clear()
        self._heap.clear()


class Task(greenlet):
    """A thread of a simulated process. ``gone``: its process was killed or stopped, so that it never runs again."""

    def __init__(self, clock: Clock, run: Callable[[], None], owner: object) -> None:
        super().__init__(lambda _woken: run(), clock.hub)
        self.owner = owner
        self.gone = False
        self._clock = clock
        self._turn = 0

    def park(self, seconds: float | None) -> bool:
        """Wait for ``wake``, at most ``seconds``; whether it came."""
        if self._clock.over:
            raise GreenletExit
        if seconds is not None:
            self._clock.after(seconds, self.resume, self._turn, False)
        woken = self._clock.hub.switch()
        if self._clock.over:
            raise GreenletExit
        return bool(woken)

    def wake(self) -> None:
        """End the present wait; does nothing to a thread that does not wait."""
        self._clock.after(0.0, self.resume, self._turn, True)

    def resume(self, turn: int, woken: bool) -> None:
        """Go on, if this is still the same wait."""
        if turn == self._turn and not self.gone and not self.dead:
            self._turn += 1
            self.switch(woken)


def here() -> Task:
    """The thread that runs now."""
    return cast("Task", getcurrent())


class Condition:
    """Stands in for ``threading.Condition``: threads change hands in ``wait`` alone, so there is nothing to lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def notify_all(self) -> None:
        """Wake all that wait."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for ``notify_all``; whether it came in time."""
        task = here()
        self._waiting.append(task)
        woken = task.park(seconds)
        if task in self._waiting:
            self._waiting.remove(task)
        return woken

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready``; whether it was in time."""
        end = self._clock.now + seconds
        while not ready():
            left = end - self._clock.now
            if left <= 0:
                return ready()
            self.wait(left)
        return True


class Lock:
    """Stands in for ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        while self._held:
            self._waiting.append(here())
            here().park(None)
        self._held = True
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held = False
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()


def board(clock: Clock, *, current: int) -> Board:
    """Core's own board, which waits in virtual time."""
    made = Board()
    made.changed = cast("threading.Condition", Condition(clock))
    made.quieting = cast("threading.Lock", Lock())
    made.current = made.target = made.acknowledged = current
    return made
