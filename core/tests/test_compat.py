"""Compatibility: the number of the hook api, and the warning that comes one minor version before a hook goes."""

import warnings
from typing import ClassVar

import pytest

import instep
from instep import compat, plugins
from instep.compat import Deprecated, HookDeprecation, misfit, version
from instep.errors import PluginError
from instep.hooks import HOOK_API, HOOKS, Plugin, hookimpl


class Observer(Plugin):
    """A plugin with one hook."""

    HOOK_API: ClassVar[int] = HOOK_API

    @hookimpl
    def committed(self, step: int) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("api", "oldest", "newest", "part"),
    [
        (4, 2, 3, "version 4 of the hooks, this instep has the versions 2 to 3; upgrade instep"),
        (1, 2, 3, "version 1 of the hooks, this instep has the versions 2 to 3; upgrade the plugin"),
        (None, 2, 2, "version 1 of the hooks, this instep has version 2; upgrade the plugin"),
        (2, 2, 3, None),
        (3, 2, 3, None),
        (None, 1, 3, None),
    ],
)
def test_a_plugin_fits_by_its_number(api: int | None, oldest: int, newest: int, part: str | None) -> None:
    message = misfit(api, oldest=oldest, newest=newest)
    assert (part is None) == (message is None)
    assert part is None or part in str(message)


def test_a_plugin_for_a_newer_instep_is_refused_by_name() -> None:
    class Later(Observer):
        HOOK_API: ClassVar[int] = HOOK_API + 1

    with pytest.raises(
        PluginError, match=rf"plugin 'later' \(x 1\): it was written for version {HOOK_API + 1} of the hooks.*upgrade instep"
    ):
        plugins.check("plugin 'later' (x 1)", Later)


def test_a_hook_that_is_going_away_warns_whoever_implements_it() -> None:
    old = {"committed": Deprecated(since="0.4", gone="0.5", instead="use 'after' instead")}
    with pytest.warns(
        HookDeprecation, match=r"^plugin 'x': hook 'committed' is deprecated since instep 0\.4 and gone in 0\.5; use 'after'"
    ):
        compat.warn_deprecated("plugin 'x'", plugins.implemented(Observer), deprecated=old)
    with warnings.catch_warnings(record=True, action="always") as caught:
        compat.warn_deprecated("plugin 'x'", ("close",), deprecated=old)
    assert not caught


@pytest.mark.parametrize(("since", "gone"), [("0.4", "0.4"), ("0.4.1", "0.4.9"), ("1.0", "0.9")])
def test_a_hook_cannot_go_without_a_minor_version_of_warning(since: str, gone: str) -> None:
    with pytest.raises(ValueError, match="at least one minor version"):
        Deprecated(since=since, gone=gone, instead="")


def test_every_deprecated_hook_is_still_there_and_not_overdue() -> None:
    now = version(instep.__version__)
    assert [name for name, entry in compat.DEPRECATED.items() if name not in HOOKS or version(entry.gone) <= now] == []
