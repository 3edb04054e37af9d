"""What can be told about a plugin class before any hook runs: metadata, spelling, settings, and what importing it imports."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from instep import discovery, plugins
from instep.compat import HookDeprecation
from instep.errors import PluginError
from instep.hooks import HOOK_API, Plugin
from instep.model import Json
from instep.testing.answers import wrong_annotation

IMPORT_SECONDS = 120.0
_UNKNOWN = "no_such_setting"
_PROBE = """
import importlib, json, sys, traceback
target, path = json.loads(sys.argv[1])
sys.path[:] = path
import instep.hooks
where = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not where:
            frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename and f.filename != "<string>"]
            where.append(f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place")
sys.meta_path.insert(0, Spy())
before = "torch" in sys.modules
module, _, name = target.partition(":")
try:
    getattr(importlib.import_module(module), name)
except ImportError:
    if not where:
        raise
print(json.dumps({"where": where, "before": before}))
"""


def target(plugin: type[Plugin]) -> str:
    """``module:Class``."""
    return f"{plugin.__module__}:{plugin.__qualname__}"


def entry_name(plugin: type[Plugin]) -> str | None:
    """The name under which the installed metadata offers this class, ``None`` if it does not."""
    values = {found.entry.value.replace(" ", ""): name for name, claims in discovery.installed().items() for found in claims}
    return values.get(target(plugin))


def wrong_metadata(plugin: type[Plugin]) -> str | None:
    """Why the configuration could not enable it."""
    name = entry_name(plugin)
    if name is None:
        return (
            f"no installed distribution offers {target(plugin)} in the entry-point group '{discovery.GROUP}', so no configuration can "
            f'enable it. Write into pyproject.toml: [project.entry-points.{discovery.GROUP}] NAME = "{target(plugin)}", and install again'
        )
    claims = discovery.installed()[name]
    if len(claims) > 1:
        return discovery.clash(claims)
    return discovery.read_surface(claims[0]).why


def wrong_hooks(plugin: type[Plugin]) -> Iterator[str]:
    """Spelling, arguments, annotations and the hook api of a class."""
    import warnings

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HookDeprecation)
            plugins.check(plugin.__name__, plugin)
    except PluginError as error:
        yield str(error)
        return
    yield from (str(warning.message) for warning in caught if issubclass(warning.category, HookDeprecation))
    hooks = plugins.implemented(plugin)
    if not hooks:
        yield f"{plugin.__name__} implements no hook: mark its methods with @instep.hookimpl"
    if "HOOK_API" not in vars(plugin) and getattr(plugin, "HOOK_API", None) is None:
        yield f"{plugin.__name__} does not say for which version of the hooks it was written; add `HOOK_API: ClassVar[int] = {HOOK_API}`"
    for hook in hooks:
        if (wrong := wrong_annotation(hook, getattr(plugin, hook))) is not None:
            yield f"hook '{hook}' of {plugin.__name__} {wrong}"


def wrong_settings(plugin: type[Plugin], settings: Mapping[str, Json]) -> Iterator[str]:
    """What is wrong with how it takes its settings."""
    name = plugin.__name__
    try:
        made = plugin.model_validate(dict(settings))
    except ValidationError as error:
        yield f"{name} cannot be set up with {dict(settings)!r}: {error}. Settings without a default belong into the contract's `settings`"
        return
    try:
        plugin.model_validate({**settings, _UNKNOWN: 1})
        yield (
            f"{name} accepts the unknown setting '{_UNKNOWN}': a typo in its table would pass unseen. Keep `extra='forbid'` in model_config"
        )
    except ValidationError:
        pass
    for field in list(plugin.model_fields)[:1]:
        try:
            setattr(made, field, getattr(made, field))
            yield f"{name} is not frozen: its setting '{field}' can be changed while a job runs. Keep `frozen=True` in model_config"
        except ValidationError:
            pass
    try:
        again = plugin.model_validate(json.loads(made.model_dump_json()))
        if again.model_dump() != made.model_dump():
            yield f"settings of {name} change on their way through JSON, as they travel from agent to ranks: {made!r} became {again!r}"
    except (ValidationError, ValueError, TypeError) as error:
        yield f"settings of {name} do not survive JSON, as they travel from agent to ranks: {error}"


def torch_imported(plugin: type[Plugin]) -> str | None:
    """Where importing the class imports torch, ``None`` if it does not. Raises ``PluginError`` when the import itself fails."""
    command = [sys.executable, "-c", _PROBE, json.dumps([target(plugin), sys.path])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    if run.returncode:
        raise PluginError(f"a fresh interpreter cannot import {target(plugin)}: {run.stderr.strip()[-1000:]}")
    told = json.loads(run.stdout.splitlines()[-1])
    return str(told["where"][0]) if told["where"] else None
