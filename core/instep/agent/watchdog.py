"""The watchdog: which ranks are hung, from what can be seen of them at each tick. Pure, and it counts ticks, not elapsed time.

A rank that waits for its peers is never a suspect. One that does not wait, and shows no movement at all (progress words, CPU time of its
main thread, I/O, children), is hung after ``stall`` seconds or ten median steps. In a recovery the phases have deadlines of their own:
there only a stopped process, and a vote that is owed, count. An agent that was stopped for a while has counted no tick meanwhile, so it
judges nobody for its own absence.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from instep.agent import events as ev
from instep.agent.records import Progress, State

_MEDIANS = 10
_AFTER_JOIN = 3
_KEPT = 32
_ENDING = 60.0
"""Seconds without movement that a process may take to end after its script."""
_FREE = (State.BORN, State.SETUP, State.OUTSIDE, State.ENDED)
"""States in which a script may do as it likes; only the start-up deadline holds there."""


@dataclass(frozen=True)
class Timing:
    """Deadlines in seconds, see the configuration table ``watchdog``; ``acknowledge`` is from ``deadlines``."""

    tick: float = 0.05
    stall: float = 5.0
    moving: float = 1800.0
    startup: float = 600.0
    acknowledge: float = 10.0


@dataclass(frozen=True)
class Vitals:
    """What the machine tells about a process: CPU time of its main thread and its children, bytes of I/O, stopped by a signal."""

    cpu: int = 0
    io: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Sight:
    """One rank at one tick.

    ``greeted``: it said hello. ``joined``: its present birth was in step. ``owes_vote``: others have voted, it has not. ``voted``: it has,
    and waits for the others.
    """

    rank: int
    birth: int
    progress: Progress
    vitals: Vitals
    greeted: bool
    joined: bool
    owes_vote: bool = False
    voted: bool = False


@dataclass
class _Track:
    """What is remembered of a birth: its last signs of life, and for how many ticks each kind of silence has lasted."""

    birth: int
    step: int
    joined: int
    signs: tuple[object, ...] = ()
    still: int = 0
    stopped: int = 0
    uncommitted: int = 0
    owed: int = 0
    first_step: bool = True
    judged: bool = False


@dataclass
class Watchdog:
    """Judges a job of which every rank uses instep; one call of ``tick`` for each tick of the agent."""

    timing: Timing
    _tracks: dict[int, _Track] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def tick(self, sights: Sequence[Sight], *, absent: int = 0) -> list[ev.Hung | ev.Stuck]:
        """The verdicts of this tick; each birth is judged once.

        ``absent``: ranks that have no process to look at. Whoever waits, waits for them: their death is about to be told, or their birth.
        """
        for sight in sights:
            self._follow(sight)
        verdicts: list[ev.Hung | ev.Stuck] = []
        for sight in sights:
            track = self._tracks[sight.rank]
            if not track.judged and (why := self._silent(sight, track, sights)):
                track.judged = True
                dump = sight.greeted and not sight.vitals.stopped and sight.progress.state is not State.BORN
                verdicts.append(ev.Hung(sight.rank, sight.birth, why, dump))
        return verdicts or ([] if absent else self._deadlock(sights))

    def _follow(self, sight: Sight) -> None:
        progress = sight.progress
        track = self._tracks.get(sight.rank)
        if track is None or track.birth != sight.birth:
            track = self._tracks[sight.rank] = _Track(birth=sight.birth, step=progress.step, joined=progress.joined)
        signs = _signs(sight)
        track.still = track.still + 1 if signs == track.signs else 0
        track.signs = signs
        track.stopped = track.stopped + 1 if sight.vitals.stopped else 0
        track.owed = track.owed + 1 if sight.owes_vote else 0
        if progress.joined != track.joined:
            track.joined, track.first_step = progress.joined, True
        if progress.step != track.step:
            if not track.first_step and progress.step > track.step:
                self._steps.append((track.uncommitted + 1) * self.timing.tick / (progress.step - track.step))
            track.step, track.uncommitted, track.first_step = progress.step, 0, False
        else:
            track.uncommitted += 1

    def _seconds(self, ticks: int) -> float:
        return ticks * self.timing.tick

    def _stall(self, track: _Track) -> float:
        usual = max(self.timing.stall, _MEDIANS * median(self._steps)) if self._steps else self.timing.stall
        return usual * _AFTER_JOIN if track.first_step else usual

    def _silent(self, sight: Sight, track: _Track, sights: Sequence[Sight]) -> str | None:
        timing, progress = self.timing, sight.progress
        still, stopped, owed = (self._seconds(ticks) for ticks in (track.still, track.stopped, track.owed))
        free = not sight.joined or progress.state in _FREE
        limit = self._limit(sight, track, sights)
        if stopped >= limit:
            return f"its process has been stopped for {stopped:.1f} s"
        if owed >= (timing.acknowledge if limit < timing.moving else timing.moving):
            return f"it did not acknowledge a fault within {owed:.1f} s; an `except:` in the loop, or a native call, keeps it from doing so"
        if progress.waiting or sight.voted:
            return None
        grace = _ENDING if progress.state is State.ENDED else timing.startup
        if still >= (grace if free or progress.state is State.RECOVERY else limit):
            return _no_movement(sight, still)
        uncommitted = self._seconds(track.uncommitted)
        if uncommitted >= timing.moving and not free and progress.state is not State.DONE:
            return f"it moves, but has not committed a step for {uncommitted:.0f} s (watchdog.moving)"
        return None

    def _limit(self, sight: Sight, track: _Track, sights: Sequence[Sight]) -> float:
        """Seconds that a rank may be stopped, or do nothing in a step: long where killing it would lose a step or the job."""
        if not sight.joined:
            return self._stall(track)
        if sight.progress.state in _FREE:
            return self.timing.startup
        return self._stall(track) if self._covered(sight, sights) else self.timing.moving

    def _covered(self, sight: Sight, sights: Sequence[Sight]) -> bool:
        """Whether another rank, running and not judged itself, holds at least this one's step, so that killing it loses nothing."""
        others = (s for s in sights if s.rank != sight.rank and not self._tracks[s.rank].judged)
        return any(s.joined and not s.vitals.stopped and s.progress.step >= sight.progress.step for s in others)

    def _deadlock(self, sights: Sequence[Sight]) -> list[ev.Hung | ev.Stuck]:
        if not sights or any(not s.greeted or not s.progress.waiting or s.progress.state is State.RECOVERY for s in sights):
            return []
        if any(s.vitals.stopped for s in sights):
            return []
        tracks = [self._tracks[s.rank] for s in sights]
        free = any(s.progress.state in _FREE for s in sights)
        limit = self.timing.startup if free else max(self._stall(t) for t in tracks)
        if any(t.judged for t in tracks) or min(self._seconds(t.still) for t in tracks) < limit:
            return []
        for track in tracks:
            track.judged = True
        return [ev.Stuck(table(sights))]


def table(sights: Sequence[Sight]) -> str:
    """What each rank waits in: process group, operation, and its number in the sequence of that group."""
    rows = [(f"rank {s.rank}", s.progress.operation or s.progress.state.name.lower(), str(s.progress.sequence)) for s in sights]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {r:<{widths[0]}}  {o:<{widths[1]}}  number {n}" for r, o, n in rows)


def movement(progress: Progress) -> tuple[int, ...]:
    """The progress words that move when main does something; the control thread's beat is none of them."""
    p = progress
    return (p.state, p.block, p.step, p.collectives, p.deliveries, p.frame, p.waiting, p.sequence, p.joined)


def _signs(sight: Sight) -> tuple[object, ...]:
    return (*movement(sight.progress), sight.vitals.cpu, sight.vitals.io)


def _no_movement(sight: Sight, seconds: float) -> str:
    p = sight.progress
    return f"no movement for {seconds:.1f} s in {p.state.name.lower()} of step {p.step} (after collective {p.collectives})"
