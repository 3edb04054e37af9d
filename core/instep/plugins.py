"""Loads the plugins that the configuration enables, and asks their hooks one by one.

Nothing else is imported: installed is not enabled. Every error names the plugin, its distribution and version, what is wrong and
what to do. A bare hook call of pluggy would stop at the first exception without naming the plugin; ``LoadedPlugins`` does not.
"""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType

import pluggy
from pydantic import ValidationError

from instep.compat import misfit, warn_deprecated
from instep.config import Config, suggest
from instep.discovery import Found, clash, enabled, installed, missing, read_surface
from instep.errors import ConfigError, InstepError, PluginError
from instep.hooks import HOOKS, Plugin


class LoadedPlugins:
    """The plugins of one process, asked in the order of the configuration; ``tryfirst`` and ``trylast`` bend it, core is last."""

    def __init__(self, plugins: Mapping[str, Plugin] | None = None) -> None:
        self._manager = _Manager("instep")
        self._manager.add_hookspecs(Plugin)
        self._plugins = dict(plugins or {})
        self._own: set[str] = set()
        for name, plugin in reversed(self._plugins.items()):
            self._add(name, plugin)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all plugins, core's own last."""
        return tuple(self._plugins)

    def get(self, name: str) -> Plugin | None:
        """The instance of a plugin, ``None`` if it is not loaded."""
        return self._plugins.get(name)

    def register(self, name: str, plugin: Plugin) -> None:
        """Add a part of core itself, which answers after every plugin."""
        if name in self._plugins:
            raise PluginError(f"the name '{name}' belongs to core; rename the plugin that claims it")
        self._own.add(name)
        self._plugins[name] = plugin
        self._add(name, plugin)

    def each(self, hook: str, **arguments: object) -> Iterator[tuple[str, Callable[[], object]]]:
        """The implementations of a hook, one by one: the plugin's name, and the call, ready to be made and timed.

        An implementation may take fewer arguments than the hook has. ``close`` runs in reverse order. What a call raises carries a
        note that names hook and plugin.
        """
        for name, call in self.every(hook):
            yield name, functools.partial(call, **arguments)

    def every(self, hook: str) -> Iterator[tuple[str, Callable[..., object]]]:
        """As ``each``, for calls that are made again and again, each with all arguments of the hook, by keyword."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        ordered = caller.get_hookimpls()[::-1]
        ordered.sort(key=lambda implementation: implementation.plugin_name in self._own)
        for implementation in reversed(ordered) if hook == "close" else ordered:
            yield implementation.plugin_name, _calling(hook, implementation)

    def first(self, hook: str, **arguments: object) -> tuple[str, object] | None:
        """The first answer to a hook that is not ``None`` and the plugin that gave it; ``None`` if nobody answers."""
        for name, call in self.each(hook, **arguments):
            answer = call()
            if answer is not None:
                return name, answer
        return None

    def _add(self, name: str, plugin: Plugin) -> None:
        try:
            self._manager.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin '{name}': {error}") from error


def load(config: Config, *, implementing: Collection[str] | None = None) -> LoadedPlugins:
    """Import and set up what the configuration enables.

    Args:
        config: the configuration; its ``plugins`` table says which, with what settings.
        implementing: import only plugins whose source text shows one of these hooks (the agent wants few, and no torch).

    Raises:
        PluginError: a plugin is not installed, claimed twice, cannot be imported, or breaks the rules of hooks.
        ConfigError: the settings of a plugin are wrong.
    """
    there = installed()
    plugins: dict[str, Plugin] = {}
    errors: list[InstepError] = []
    for name, settings in enabled(config).items():
        try:
            found = _one(name, there)
            if implementing is None or set(implementing) & set(_readable(found)):
                plugins[name] = _set_up(found, _import(found), settings)
        except InstepError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise PluginError("\n".join(str(error) for error in errors))
    return LoadedPlugins(plugins)


@functools.lru_cache(maxsize=1)
def prepared(table: str) -> LoadedPlugins:
    """What ``load`` gives for a table of plugins in JSON, once a process: forked workers inherit it from the fork server."""
    return load(Config(plugins=json.loads(table)))


def check(name: str, plugin: type[Plugin]) -> None:
    """Hold a plugin class against the rules of hooks, and warn of those that are going away.

    Raises ``PluginError`` with all that is wrong; ``name`` begins each line.
    """
    wrong = list(_faults(plugin))
    if wrong:
        raise PluginError("\n".join(f"{name}: {fault}" for fault in wrong))
    warn_deprecated(name, implemented(plugin))


def implemented(plugin: type[Plugin]) -> tuple[str, ...]:
    """The hooks that a plugin class implements, its own and inherited ones, in lifecycle order."""
    return tuple(hook for hook in HOOKS if getattr(getattr(plugin, hook), "instep_impl", None) is not None)


class _Manager(pluggy.PluginManager):
    """Looks at methods with the name of a hook only: a plugin is a pydantic model, with many attributes that are costly to ask for."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name in HOOKS else None

    def parse_hookspec_opts(self, module_or_class: ModuleType | type, name: str) -> pluggy.HookspecOpts | None:
        return super().parse_hookspec_opts(module_or_class, name) if name in HOOKS else None


def _calling(hook: str, implementation: pluggy.HookImpl) -> Callable[..., object]:
    function, accepted = implementation.function, implementation.argnames

    def call(**arguments: object) -> object:
        try:
            return function(**{name: arguments[name] for name in accepted})
        except Exception as error:
            error.add_note(f"in hook '{hook}' of plugin '{implementation.plugin_name}'")
            raise

    return call


def _one(name: str, there: Mapping[str, tuple[Found, ...]]) -> Found:
    claims = there.get(name, ())
    if not claims:
        raise PluginError(missing(name, there))
    if len(claims) > 1:
        raise PluginError(clash(claims))
    return claims[0]


def _readable(found: Found) -> tuple[str, ...]:
    """The hooks in a plugin's source. Raises ``PluginError`` for what can be told to be wrong from the source alone."""
    shown = read_surface(found)
    if shown.why:
        raise PluginError(shown.why)
    return shown.hooks


def _import(found: Found) -> type[Plugin]:
    try:
        plugin = found.entry.load()
    except ImportError as error:
        own = (error.name or "").partition(".")[0] == found.entry.module.partition(".")[0]
        lacking = f"; install {f'{found.distribution} again' if own else error.name}" if isinstance(error, ModuleNotFoundError) else ""
        raise PluginError(f"{found} cannot be imported from {found.entry.value}: {error}{lacking}") from error
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise PluginError(f"{found} cannot be imported from {found.entry.value}: {type(error).__name__}: {error}") from error
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        raise PluginError(f"{found}: {found.entry.value} is not a class that inherits instep.Plugin")
    check(str(found), plugin)
    return plugin


def _set_up(found: Found, plugin: type[Plugin], settings: Mapping[str, object]) -> Plugin:
    try:
        return plugin.model_validate(settings)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                lines.append(f"unknown key '{key}'; {suggest(key, plugin.model_fields)}")
            else:
                lines.append(f"'{key}': {item['msg'].removeprefix('Value error, ')}, not {item['input']!r}")
        raise ConfigError("\n".join(f"[plugins.{found.name}] ({found.distribution} {found.version}) {line}" for line in lines)) from None


def _faults(plugin: type[Plugin]) -> Iterator[str]:
    if (why := misfit(getattr(plugin, "HOOK_API", None))) is not None:
        yield why
        return
    for name, method in inspect.getmembers(plugin, inspect.isfunction):
        options = getattr(method, "instep_impl", None)
        if options is None:
            if name in HOOKS and method is not getattr(Plugin, name):
                yield f"'{name}' has the name of a hook without its mark; write @instep.hookimpl above it"
        elif name not in HOOKS:
            yield f"'{name}' is no hook; {suggest(name, HOOKS)}"
        elif inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or options["wrapper"] or options["hookwrapper"]:
            yield f"hook '{name}' must be a plain method: no coroutine, generator or wrapper"
        else:
            known = inspect.signature(getattr(Plugin, name)).parameters
            for argument in inspect.signature(method).parameters:
                if argument not in known:
                    yield f"hook '{name}' takes an argument '{argument}' that it is never given; {suggest(argument, list(known)[1:])}"
