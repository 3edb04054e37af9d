"""What plugins put into the environment of a job's processes before the first of them starts, and where each value comes from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from instep import plugins
from instep.agent.launch import Launch
from instep.agent.spawner import Server
from instep.errors import InstepError, PluginError
from instep.plugins import LoadedPlugins


@dataclass(frozen=True)
class Variable:
    """A variable that a plugin gives to the workers, unless the shell has set it."""

    value: str
    plugin: str


def equipped(launch: Launch) -> Launch:
    """The launch with what the ``environment`` hooks of its plugins give. Raises ``PluginError`` or ``ConfigError``."""
    if not launch.config.enabled:
        return launch
    given = given_by(plugins.load(launch.config, implementing=("environment",)))
    return replace(launch, given={name: variable.value for name, variable in given.items()})


@contextmanager
def serving(launch: Launch) -> Iterator[Server]:
    """A fork server for several jobs with the configuration of ``launch``; the first of them warms it."""
    server = Server(equipped(launch).server_environment())
    try:
        yield server
    finally:
        server.stop()


def given_by(loaded: LoadedPlugins) -> dict[str, Variable]:
    """All variables that plugins give, by name.

    Raises:
        PluginError: a hook raised, answered with something else than strings, or two plugins give one variable two values.
    """
    out: dict[str, Variable] = {}
    for plugin, call in loaded.each("environment"):
        for name, value in _answer(plugin, call).items():
            other = out.setdefault(name, Variable(value, plugin))
            if other.value != value:
                raise PluginError(
                    f"the plugins '{other.plugin}' and '{plugin}' give the variable {name} two values, {other.value!r} and {value!r}; "
                    f"leave it out of one of their settings, or set {name} in the shell, which wins"
                )
    return out


def source(name: str, variable: Variable, *, shell: Mapping[str, str], written: Mapping[str, str]) -> str:
    """Where the value that workers see comes from: ``shell``, the place in the configuration, or ``default of PLUGIN``.

    ``written`` tells the source of each value of the configuration; a plugin that lets its variables be set has a table ``variables``.
    """
    if name in shell:
        return "shell"
    return written.get(f"plugins.{variable.plugin}.variables.{name}", f"default of {variable.plugin}")


def _answer(plugin: str, call: object) -> Mapping[str, str]:
    try:
        answer = call() if callable(call) else None
    except InstepError as error:
        raise PluginError(f"plugin '{plugin}': environment: {error}") from error
    except Exception as error:  # a plugin's code may raise anything; the job has not started yet
        raise PluginError(f"plugin '{plugin}': environment raised {type(error).__name__}: {error}") from error
    if answer is None:
        return {}
    if not isinstance(answer, Mapping) or not all(isinstance(item, str) for pair in answer.items() for item in pair):
        raise PluginError(f"plugin '{plugin}': environment returned {answer!r}; it must return a mapping of names to strings, or None")
    return answer
