"""What plugins are installed, told from metadata and source text alone: nothing is imported, so a broken plugin can be listed."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, metadata
from pathlib import Path
from typing import Literal, NamedTuple

from instep.compat import DEPRECATED, Deprecated, misfit
from instep.config import Config, suggest
from instep.hooks import HOOKS

GROUP = "instep"
Status = Literal["enabled", "off", "broken", "missing"]


@dataclass(frozen=True)
class Found:
    """One entry point of group ``instep``, and the distribution that brings it."""

    name: str
    distribution: str
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        """How messages name it."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Listing:
    """One line of ``instep plugins``. ``hooks`` and ``api`` are read from the source text.

    ``why`` says what is broken, ``soon`` what will be: hooks that are going away, and for one that is off what enabling it needs.
    """

    name: str
    status: Status
    distribution: str | None
    version: str | None
    enabled: bool
    api: int | None
    hooks: tuple[str, ...]
    why: str | None
    soon: tuple[str, ...] = ()


class Surface(NamedTuple):
    """What a plugin's source text shows: its hooks in lifecycle order, the hook api it declares, and what is wrong, if anything.

    ``needs``: distributions that it says it works with, and that are not there.
    """

    hooks: tuple[str, ...] = ()
    api: int | None = None
    why: str | None = None
    needs: tuple[str, ...] = ()


def installed() -> Mapping[str, tuple[Found, ...]]:
    """All installed plugins by name; a name with more than one entry is claimed by several distributions."""
    out: dict[str, tuple[Found, ...]] = {}
    for entry in entry_points(group=GROUP):
        dist = entry.dist
        found = Found(entry.name, dist.name if dist else "unknown", dist.version if dist else "unknown", entry)
        out[entry.name] = (*out.get(entry.name, ()), found)
    return dict(sorted(out.items()))


def listings(config: Config, *, deprecated: Mapping[str, Deprecated] = DEPRECATED) -> Iterator[Listing]:
    """Every plugin that is installed or enabled, in order of name, with what can be told to be wrong without importing it."""
    there = installed()
    for name in sorted({*there, *enabled(config)}):
        claims = there.get(name, ())
        on = name in enabled(config)
        if len(claims) != 1:
            yield Listing(
                name,
                status="broken" if claims else "missing",
                distribution=None,
                version=None,
                enabled=on,
                api=None,
                hooks=(),
                why=clash(claims) if claims else missing(name, there),
            )
            continue
        found = claims[0]
        shown = read_surface(found)
        lacks = tuple(_lacks(found, shown))
        why = shown.why or ("\n".join(lacks) if on and lacks else None)
        status: Status = "broken" if why else "enabled" if on else "off"
        soon = tuple(f"{found}: {deprecated[hook].tell(hook)}" for hook in shown.hooks if hook in deprecated)
        yield Listing(name, status, found.distribution, found.version, on, shown.api, shown.hooks, why, soon + (() if why else lacks))


def enabled(config: Config) -> Mapping[str, Mapping[str, object]]:
    """The settings of each plugin that the configuration switches on, in its order."""
    return {name: ({} if table is True else dict(table)) for name, table in config.plugins.items() if table is not False}


def read_surface(found: Found) -> Surface:
    """What a plugin's source text shows. Hooks that are inherited from a class in another file are not seen."""
    file = _source_file(found.entry.module)
    if file is None:
        return Surface(why=f"{found}: there is no module {found.entry.module}; install {found.distribution} again")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return Surface(why=f"{found}: {file} cannot be read: {error}")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == found.entry.attr:
            methods = {m.name: any(map(_is_hookimpl, m.decorator_list)) for m in node.body if isinstance(m, ast.FunctionDef)}
            api = _declared_api(node)
            wrong = [*_wrong(methods), *filter(None, [misfit(api)])]
            hooks = tuple(hook for hook in HOOKS if methods.get(hook))
            needs = tuple(name for name in _declared_needs(node) if not _there(name))
            return Surface(hooks, api, "\n".join(f"{found}: {fault}" for fault in wrong) or None, needs)
    return Surface()


def _wrong(methods: Mapping[str, bool]) -> Iterator[str]:
    for name, marked in methods.items():
        if marked and name not in HOOKS:
            yield f"'{name}' is no hook; {suggest(name, HOOKS)}"
        elif not marked and name in HOOKS:
            yield f"'{name}' has the name of a hook without its mark; write @instep.hookimpl above it"


def _lacks(found: Found, shown: Surface) -> Iterator[str]:
    """What to say about distributions that a plugin needs. Its own distribution has an extra of the plugin's name for them."""
    if shown.needs:
        extra = f"{found.distribution}[{found.name.replace('_', '-')}]"
        yield f"{found} needs {' and '.join(shown.needs)}, which {_is(shown.needs)} not installed; type: pip install '{extra}'"


def _is(names: tuple[str, ...]) -> str:
    return "is" if len(names) == 1 else "are"


def _there(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _declared_api(node: ast.ClassDef) -> int | None:
    value = _declared(node, "HOOK_API")
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, int) else None


def _declared_needs(node: ast.ClassDef) -> Iterator[str]:
    value = _declared(node, "NEEDS")
    for each in value.elts if isinstance(value, ast.Tuple | ast.List) else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _declared(node: ast.ClassDef, name: str) -> ast.expr | None:
    """What a class gives a name in its body, as it stands there."""
    for item in node.body:
        targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets if isinstance(item, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value if isinstance(item, ast.AnnAssign | ast.Assign) else None
    return None


def clash(claims: tuple[Found, ...]) -> str:
    """What to say when several distributions claim one name."""
    both = " and ".join(f"{c.distribution} {c.version}" for c in claims)
    return f"plugin '{claims[0].name}' is claimed by {both}; uninstall all but one of them"


def missing(name: str, there: Mapping[str, object]) -> str:
    """What to say about a plugin that is enabled and not installed."""
    extra = name.replace("_", "-")
    if extra in _extras():
        remedy = f"type: pip install 'instep[{extra}]'"
    else:
        remedy = f"{suggest(name, there)} Install what provides it, or set plugins.{name} = false"
    return f"plugin '{name}' is enabled but not installed; installed are {', '.join(there) or 'none'}; {remedy}"


def _extras() -> list[str]:
    try:
        return metadata("instep").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []


def _source_file(module: str) -> Path | None:
    """The file of a module, found without importing the packages above it."""
    path: list[str] | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None:
            return None
        if end == len(parts):
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        path = list(spec.submodule_search_locations or ())
    return None


def _is_hookimpl(node: ast.expr) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)) == "hookimpl"
