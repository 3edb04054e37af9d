"""Loading plugins: only what is enabled is imported, and every way to be wrong is told with names, versions and a remedy."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from instep import discovery, plugins
from instep.compat import Deprecated
from instep.config import Config
from instep.errors import ConfigError, InstepError, PluginError
from instep.hooks import HOOK_API, HOOKS, Plugin, hookimpl

Install = Callable[..., None]
GOOD = """
    import instep
    class Good(instep.Plugin):
        linger: float = 1.0
        @instep.hookimpl
        def committed(self, step: int) -> None: ...
        @instep.hookimpl(trylast=True)
        def close(self) -> None: ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one plugin on the path, as an installer would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, source: str | None, *, distribution: str | None = None, version: str = "1.2.3", cls: str = "Good") -> None:
        distribution = distribution or f"instep-{name}"
        module = f"fake_{distribution.replace('-', '_')}"
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[instep]\n{name} = {module}.plugin:{cls}\n", encoding="utf-8")
        if source is not None:
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text("", encoding="utf-8")
            (tmp_path / module / "plugin.py").write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


def config(**tables: object) -> Config:
    return Config.model_validate({"plugins": tables})


def failure(kind: type[InstepError], **tables: object) -> str:
    with pytest.raises(kind) as caught:
        plugins.load(config(**tables))
    return str(caught.value)


def test_only_what_is_enabled_is_imported(install: Install) -> None:
    install("good", GOOD)
    install("idle", GOOD, distribution="instep-idle")
    install("bomb", "raise SystemExit('imported')", distribution="instep-bomb")
    loaded = plugins.load(config(good={"linger": 2.5}, idle=False))
    assert loaded.names == ("good",)
    good = loaded.get("good")
    assert good is not None
    assert good.model_dump() == {"linger": 2.5}
    assert not [name for name in sys.modules if name.startswith(("fake_instep_idle", "fake_instep_bomb"))]


def test_a_plugin_without_a_hook_that_is_wanted_is_not_imported(install: Install) -> None:
    install("seer", GOOD, distribution="instep-seer")
    assert plugins.load(config(seer=True), implementing=("plan", "report")).names == ()
    assert "fake_instep_seer.plugin" not in sys.modules
    assert plugins.load(config(seer=True), implementing=("report", "close")).names == ("seer",)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("goood", ["'goood' is enabled but not installed", "did you mean 'good'", "installed are", "plugins.goood = false"]),
        ("init_nothing", ["'init_nothing'", "not installed"]),
    ],
)
def test_a_plugin_that_is_not_installed(install: Install, name: str, parts: list[str]) -> None:
    install("good", GOOD, distribution="instep-good2")
    message = failure(PluginError, **{name: True})
    assert [part for part in parts if part not in message] == []


def test_a_plugin_of_ours_that_is_not_installed_comes_with_the_command() -> None:
    message = discovery.missing("init_gloo", {"state_replica": ()})
    assert "pip install 'instep[init-gloo]'" in message
    assert "installed are state_replica" in message


def test_two_distributions_that_claim_one_name_are_both_named(install: Install) -> None:
    install("twin", GOOD, distribution="instep-twin", version="1.0")
    install("twin", GOOD, distribution="other-twin", version="3.1")
    message = failure(PluginError, twin=True)
    assert "instep-twin 1.0" in message
    assert "other-twin 3.1" in message
    assert "uninstall" in message


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_thing", ["No module named 'no_such_thing'", "install no_such_thing"]),
        ("1 / 0", ["ZeroDivisionError: division by zero"]),
        ("class Other: ...", ["has no attribute 'Good'"]),
        ("def f(:", ["SyntaxError"]),
        (None, ["No module named", "install instep-broken again"]),
        ("class Good: ...", ["is not a class that inherits instep.Plugin"]),
        ("Good = 3", ["is not a class that inherits instep.Plugin"]),
        (GOOD + "        HOOK_API = 9\n", ["non-annotated attribute"]),
        (
            "import typing\n" + textwrap.dedent(GOOD) + "    HOOK_API: typing.ClassVar[int] = 9\n",
            ["version 9 of the hooks", "has version 1", "upgrade instep"],
        ),
        (GOOD.replace("committed", "comitted"), ["'comitted' is no hook", "did you mean 'committed'"]),
        (GOOD.replace("step: int", "steps: int"), ["'committed' takes an argument 'steps'", "did you mean 'step'"]),
        (GOOD.replace("@instep.hookimpl\n", "\n"), ["'committed' has the name of a hook without its mark", "@instep.hookimpl"]),
        (GOOD.replace("def committed", "async def committed"), ["hook 'committed' must be a plain method"]),
        (GOOD.replace("trylast=True", "wrapper=True"), ["hook 'close' must be a plain method"]),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution_and_fault(install: Install, source: str | None, parts: list[str]) -> None:
    install("broken", source, distribution="instep-broken", version="0.7")
    for module in [name for name in sys.modules if name.startswith("fake_instep_broken")]:
        del sys.modules[module]
    message = failure(PluginError, broken=True)
    assert [part for part in ["plugin 'broken' (instep-broken 0.7)", *parts] if part not in message] == []


def test_the_first_cause_of_a_failed_import_is_kept(install: Install) -> None:
    install("crash", "raise OSError('no device')", distribution="instep-crash")
    with pytest.raises(PluginError, match="OSError: no device") as caught:
        plugins.load(config(crash=True))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"lingr": 1}, ["unknown key 'lingr'", "did you mean 'linger'"]),
        ({"linger": "long"}, ["'linger'", "valid number", "'long'"]),
    ],
)
def test_wrong_settings_name_table_and_key(install: Install, settings: dict[str, object], parts: list[str]) -> None:
    install("good", GOOD, distribution="instep-good3")
    message = failure(ConfigError, good=settings)
    assert [part for part in ["[plugins.good]", "instep-good3 1.2.3", *parts] if part not in message] == []


def test_all_broken_plugins_are_told_at_once(install: Install) -> None:
    install("one", "class Good: ...", distribution="instep-one")
    message = failure(PluginError, one=True, two=True)
    assert "'one'" in message
    assert "'two'" in message


def test_a_listing_tells_what_is_broken_without_importing(install: Install) -> None:
    install("fine", GOOD, distribution="instep-fine")
    install("typo", GOOD.replace("committed", "comitted"), distribution="instep-typo")
    install("gone", None, distribution="instep-gone")
    later = "import typing\n" + textwrap.dedent(GOOD) + "    HOOK_API: typing.ClassVar[int] = 9\n"
    install("later", later, distribution="instep-later")
    listing = {line.name: line for line in discovery.listings(config(fine=True, typo=False, lost=True))}
    assert listing["fine"].hooks == ("committed", "close")
    assert (listing["fine"].enabled, listing["fine"].why, listing["fine"].version) == (True, None, "1.2.3")
    assert "did you mean 'committed'" in (listing["typo"].why or "")
    assert not listing["typo"].enabled
    assert "install instep-gone again" in (listing["gone"].why or "")
    assert (listing["later"].status, listing["later"].api) == ("broken", 9)
    assert "written for version 9 of the hooks, this instep has version 1; upgrade instep" in (listing["later"].why or "")
    assert "not installed" in (listing["lost"].why or "")
    assert not [name for name in sys.modules if name.startswith(("fake_instep_fine", "fake_instep_typo"))]


def test_a_listing_tells_of_hooks_that_are_going_away(install: Install) -> None:
    install("aged", GOOD, distribution="instep-aged")
    old = {"committed": Deprecated(since="0.4", gone="0.5", instead="use 'after' instead")}
    (line,) = (line for line in discovery.listings(config(aged=True), deprecated=old) if line.name == "aged")
    assert line.soon == (
        "plugin 'aged' (instep-aged 1.2.3): hook 'committed' is deprecated since instep 0.4 and gone in 0.5; use 'after' instead",
    )
    assert line.why is None


@pytest.mark.parametrize("on", [True, False])
def test_a_listing_tells_which_distributions_a_plugin_needs(install: Install, on: bool) -> None:
    source = textwrap.dedent(GOOD) + "    NEEDS: 'ClassVar[tuple[str, ...]]' = ('pluggy', 'no-such-framework')\n"
    install("needy", source, distribution="instep-needy")
    (line,) = (line for line in discovery.listings(config(needy=on)) if line.name == "needy")
    said = "plugin 'needy' (instep-needy 1.2.3) needs no-such-framework, which is not installed; type: pip install 'instep-needy[needy]'"
    assert (line.status, line.why, line.soon) == (("broken", said, ()) if on else ("off", None, (said,)))


class First(Plugin):
    """Answers ``plan`` and counts what it was asked."""

    answer: str | None = None
    calls: list[str] = []  # noqa: RUF012 - a pydantic field

    @hookimpl
    def committed(self, step: int) -> None:
        self.calls.append(f"committed {step}")

    @hookimpl
    def plan(self) -> str | None:  # type: ignore[override]
        self.calls.append("plan")
        return self.answer

    @hookimpl
    def close(self) -> None:
        self.calls.append("close")


class Eager(First):
    @hookimpl(tryfirst=True)
    def plan(self) -> str | None:  # type: ignore[override]
        return super().plan()


def order(loaded: plugins.LoadedPlugins, hook: str) -> list[str]:
    return [name for name, _ in loaded.each(hook, step=1, votes=())]


def test_plugins_are_asked_in_the_order_of_the_configuration_and_core_last() -> None:
    loaded = plugins.LoadedPlugins({"a": First(answer="1"), "b": First(answer="2"), "c": Eager(answer="3")})
    loaded.register("core", First(answer="4"))
    assert loaded.names == ("a", "b", "c", "core")
    assert order(loaded, "committed") == ["a", "b", "c", "core"]
    assert order(loaded, "plan") == ["c", "a", "b", "core"]
    assert order(loaded, "close") == ["core", "c", "b", "a"]
    assert order(loaded, "verify") == []


def test_the_first_answer_wins_and_nobody_else_is_asked() -> None:
    silent, speaker, never = First(), First(answer="mine"), First(answer="late")
    loaded = plugins.LoadedPlugins({"silent": silent, "speaker": speaker, "never": never})
    assert loaded.first("plan", votes=()) == ("speaker", "mine")
    assert (silent.calls, speaker.calls, never.calls) == (["plan"], ["plan"], [])
    assert plugins.LoadedPlugins({"silent": silent}).first("plan", votes=()) is None


def test_each_call_can_be_made_on_its_own_and_a_failure_stops_no_other() -> None:
    class Failing(Plugin):
        @hookimpl
        def committed(self) -> None:  # type: ignore[override]
            raise ValueError("mine alone")

    last = First()
    loaded = plugins.LoadedPlugins({"failing": Failing(), "last": last})
    failed = []
    for name, call in loaded.each("committed", step=4):
        try:
            call()
        except ValueError as error:
            failed.append((name, error.__notes__))
    assert failed == [("failing", ["in hook 'committed' of plugin 'failing'"])]
    assert last.calls == ["committed 4"]


def test_core_refuses_a_plugin_that_took_its_name() -> None:
    loaded = plugins.LoadedPlugins({"core": First()})
    with pytest.raises(PluginError, match="belongs to core"):
        loaded.register("core", First(answer="x"))


@pytest.mark.parametrize("name", ["init_gloo", "state_replica", "mmap_loader", "nemo"])
def test_the_shipped_plugins_load_and_show_in_their_source_what_they_implement(name: str) -> None:
    pytest.importorskip("torch")
    if name not in discovery.installed():
        pytest.skip(f"{name} is not installed")
    loaded = plugins.load(config(**{name: True}))
    shown = discovery.read_surface(discovery.installed()[name][0])
    assert (shown.why, shown.api) == (None, HOOK_API)
    assert [hook for hook in HOOKS if order_any(loaded, hook)] == list(shown.hooks)


def order_any(loaded: plugins.LoadedPlugins, hook: str) -> bool:
    names = ("job", "groups", "step", "book", "interruption", "votes", "request", "recovery", "incident")
    return bool(list(loaded.each(hook, **dict.fromkeys(names))))
