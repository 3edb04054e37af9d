"""Large worlds: what one recovery costs the control plane in messages, bytes and seconds of deciding."""

import time
from dataclasses import dataclass

from instep.testing.simulator.schedule import Schedule, Trouble
from instep.testing.simulator.world import World, quiet

_STEPS, _LATE = 20, 12
"""Steps of the job, and the commits before the death: the agent must have heard that all ranks joined, else the whole job starts again."""
_SMALL, _REPEATS = 200, 3
"""Up to how many ranks a run is repeated, since its times are short beside those of a busy machine's other work; and how often."""


@dataclass(frozen=True)
class Costs:
    """One job of ``world`` ranks of which one is killed in a commit.

    ``messages`` and ``bytes`` are those of the recovery alone. ``deciding``: seconds of real time in coordinator and plan, ``planning`` in
    the plan alone. ``recovered``: virtual seconds from the death until all ranks are in step, with the simulator's delays.
    """

    world: int
    messages: int
    bytes: int
    deciding: float
    planning: float
    recovered: float
    seconds: float


def costs(world: int) -> Costs:
    """Simulate the recovery of one rank of ``world``; the same job without the death is taken off."""
    calm, death = Schedule(seed=1, world=world, blocks=(_STEPS,)), Trouble("kill", world // 2, point="barrier", skip=_LATE)
    began = time.perf_counter()
    with quiet():
        without = _run(calm)
        job = _run(Schedule(seed=1, world=world, blocks=(_STEPS,), troubles=(death,)))
    a, b = job.agent, without.agent
    (report,) = job.checks.reports
    recovered = report.seconds_to_resume
    if recovered is None or report.scope != "in_process":
        raise AssertionError(f"{world} ranks: not recovered in process ({report.scope}), so there is nothing to measure")
    return Costs(
        world=world,
        messages=a.sent.total() - b.sent.total(),
        bytes=a.bytes - b.bytes,
        deciding=a.deciding - b.deciding,
        planning=a.planning,
        recovered=recovered,
        seconds=time.perf_counter() - began,
    )


def _run(schedule: Schedule) -> World:
    """The one of several equal runs in which the agent's code took the least time; they differ in nothing else."""
    worlds = [World(schedule, measure=True) for _ in range(_REPEATS if schedule.world <= _SMALL else 1)]
    for world in worlds:
        world.run()
    return min(worlds, key=lambda world: world.agent.deciding)
