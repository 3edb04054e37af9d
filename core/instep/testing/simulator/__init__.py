"""A simulator: core's own lifecycle, commit, plan, coordinator and watchdog in virtual time, with every fault that a seed asks for."""

from instep.testing.simulator.checks import Violation
from instep.testing.simulator.schedule import Schedule, Trouble, drawn
from instep.testing.simulator.world import Outcome, World, quiet

__all__ = ["Outcome", "Schedule", "Trouble", "Violation", "World", "drawn", "quiet"]
