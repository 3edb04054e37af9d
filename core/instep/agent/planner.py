"""The planner of a job: the first plugin that answers ``plan``, else core's own function."""

from collections.abc import Sequence

from instep.agent.job import Planner
from instep.errors import PluginError
from instep.model import Plan, Unrecoverable, Vote
from instep.plan import plan
from instep.plugins import LoadedPlugins


def planner(plugins: LoadedPlugins) -> Planner:
    """A planner that asks these plugins. One that raises sends the job to the next rung; an answer of another type is an error."""

    def decide(votes: Sequence[Vote]) -> Plan | Unrecoverable:
        for name, call in plugins.each("plan", votes=votes):
            try:
                answer = call()
            except Exception as error:  # noqa: BLE001 - whatever a plugin raises, the job goes on to the next rung
                why = f"plugin {name}: plan raised {type(error).__name__}: {error}"
                return Unrecoverable(incarnation=votes[0].incarnation, why=why)
            if isinstance(answer, Plan | Unrecoverable):
                return answer
            if answer is not None:
                raise PluginError(f"plugin {name}: plan returned {type(answer).__name__}, not a Plan, Unrecoverable or None")
        return plan(votes)

    return decide
