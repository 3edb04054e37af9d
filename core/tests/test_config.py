"""The configuration: priority of its sources, and one clear message for each kind of mistake."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from instep.config import Config, Resolved, load
from instep.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(
    text: str = "", *, name: str = "instep.toml", overrides: dict[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    if text:
        Path(name).write_text(text, encoding="utf-8")
    return load(overrides=overrides, environ=environ or {})


def test_defaults() -> None:
    resolved = read()
    assert resolved.file is None
    assert set(resolved.sources.values()) == {"default"}
    assert resolved.config == Config()
    assert resolved.config.plugins == {"init_gloo": True, "state_replica": True}
    assert resolved.config.deadlines.restore == 120.0
    assert (resolved.config.watchdog.stall, resolved.config.watchdog.tick) == (5.0, 0.05)
    assert (resolved.config.limits.recoveries_without_commit, resolved.config.limits.same_fault) == (5, 3)


def test_each_source_wins_over_the_one_before() -> None:
    text = "watchdog = {stall = 6, moving = 7, startup = 8}"
    environ = {
        "INSTEP_WATCHDOG__MOVING": "17",
        "INSTEP_WATCHDOG__STARTUP": "18",
        "HOME": "/",
        "INSTEP_BIRTH": "3",
        "INSTEP_CHANNEL": "5,6,7",
    }
    resolved = read(text, overrides={"watchdog": {"startup": 28.0}, "watchdog.enabled": False}, environ=environ)
    watchdog = resolved.config.watchdog
    assert (watchdog.tick, watchdog.stall, watchdog.moving, watchdog.startup, watchdog.enabled) == (0.05, 6.0, 17.0, 28.0, False)
    assert [resolved.sources[f"watchdog.{key}"] for key in ("tick", "stall", "moving", "startup", "enabled")] == [
        "default",
        "instep.toml",
        "environment INSTEP_WATCHDOG__MOVING",
        "override",
        "override",
    ]


def test_pyproject_is_read_where_there_is_no_file_of_our_own(tmp_path: Path) -> None:
    assert read("[tool.other]\nx = 1", name="pyproject.toml").file is None
    assert read("[tool.instep]\nenabled = false", name="pyproject.toml").config.enabled is False
    assert read("[limits]\nsame_fault = 9").config.enabled is True
    (tmp_path / "other.toml").write_text("[limits]\nsame_fault = 4", encoding="utf-8")
    assert load("other.toml", environ={}).config.limits.same_fault == 4
    assert load(environ={"INSTEP_CONFIG": "other.toml"}).file == "other.toml"


@pytest.mark.parametrize(
    ("file", "environ", "expected"),
    [
        ("plugins.init_gloo = false", {}, {"init_gloo": False, "state_replica": True}),
        ("[plugins.extra]", {}, {"init_gloo": True, "state_replica": True, "extra": {}}),
        ("[plugins.init_gloo]\na = 1", {"INSTEP_PLUGINS__INIT_GLOO": "true"}, {"init_gloo": {"a": 1}, "state_replica": True}),
        ("[plugins.init_gloo]\na = 1", {"INSTEP_PLUGINS__INIT_GLOO": "false"}, {"init_gloo": False, "state_replica": True}),
        ("[plugins.init_gloo]\na = 1", {"INSTEP_PLUGINS__INIT_GLOO__B": "x"}, {"init_gloo": {"a": 1, "b": "x"}, "state_replica": True}),
    ],
)
def test_plugins_are_switched_and_set_one_by_one(file: str, environ: dict[str, str], expected: dict[str, object]) -> None:
    assert read(file, environ=environ).config.plugins == expected


@pytest.mark.parametrize("text", ["one,two", '["one", "two"]', " one , two "])
def test_preload_is_a_list_or_a_comma_separated_text(text: str) -> None:
    assert read(environ={"INSTEP_PRELOAD": text}).config.preload == ("one", "two")


def test_the_worker_gets_back_what_the_agent_resolved() -> None:
    config = read('preload = ["a"]\n[plugins.x]\nlist = [1, {y = 2.5}]', overrides={"drill.directory": "/d"}).config
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("text", "environ", "parts"),
    [
        ("[watchdog]\nstal = 3", {}, ["instep.toml", "unknown key 'watchdog.stal'", "did you mean 'watchdog.stall'"]),
        ("[watchdogs]\nstall = 3", {}, ["instep.toml", "unknown key 'watchdogs'", "did you mean 'watchdog'"]),
        ("nonsense = 1", {}, ["unknown key 'nonsense'", "known are", "deadlines"]),
        ("[watchdog]\nstall = 'soon'", {}, ["instep.toml", "'watchdog.stall'", "valid number", "'soon'"]),
        ("[watchdog]\nstall = 0", {}, ["'watchdog.stall'", "greater than 0"]),
        ("[deadlines]\nrestore = inf", {}, ["'deadlines.restore'", "finite"]),
        ("[limits]\nsame_fault = 1.5", {}, ["'limits.same_fault'", "valid integer"]),
        ("watchdog = 3", {}, ["instep.toml", "'watchdog'", "dictionary"]),
        ("plugins.init_gloo = 3", {}, ["instep.toml", "'plugins.init_gloo'", "true, false or a table"]),
        ("preload = [1]", {}, ["instep.toml", "'preload.0'", "string"]),
        ("[drill]\nsteps = 3", {}, ["instep.toml", "'drill.directory' is missing"]),
        ("enabled = \n", {}, ["instep.toml", "not TOML", "line 1"]),
        ("", {"INSTEP_WATCHDOG__TIK": "1"}, ["environment INSTEP_WATCHDOG__TIK", "did you mean 'watchdog.tick'"]),
        ("", {"INSTEP_ENABLED": "perhaps"}, ["environment INSTEP_ENABLED", "'enabled'", "boolean", "'perhaps'"]),
        ("", {"INSTEP_CONFIG": "absent.toml"}, ["absent.toml", "cannot be read", "No such file"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_remedy(text: str, environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, environ=environ)
    for part in parts:
        assert part in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read("[watchdog]\nstal = 3\ntick = -1", environ={"INSTEP_ENABLE": "true"})
    assert len(str(caught.value).splitlines()) == 3


def test_a_pyproject_asked_for_by_name_must_have_our_table() -> None:
    Path("pyproject.toml").write_text("[tool.other]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no table \[tool.instep\]"):
        load("pyproject.toml", environ={})


def test_neither_the_package_nor_its_configuration_imports_torch() -> None:
    program = "import sys, instep, instep.config, instep.plugins, instep.plan; instep.errors; instep.Plugin; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.strip() == "False"
