"""What plugins give to the workers' environment: below the shell, above torchrun's defaults, and never two values for one name."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from instep import Plugin, hookimpl
from instep.agent.agent import run
from instep.agent.environment import Variable, equipped, given_by, source
from instep.agent.launch import Launch
from instep.config import Config
from instep.errors import PluginError
from instep.plugins import LoadedPlugins


class Giver(Plugin):
    """Gives what it is made with."""

    give: object = None

    @hookimpl
    def environment(self) -> Mapping[str, str] | None:
        if isinstance(self.give, Exception):
            raise self.give
        return self.give  # type: ignore[return-value]


Giver.model_config["arbitrary_types_allowed"] = True


def loaded(**gives: object) -> LoadedPlugins:
    return LoadedPlugins({name: Giver(give=give) for name, give in gives.items()})


def test_answers_are_merged_and_none_is_nothing() -> None:
    given = given_by(loaded(a={"X": "1", "Y": "2"}, b=None, c={"X": "1", "Z": "3"}))
    assert given == {"X": Variable("1", "a"), "Y": Variable("2", "a"), "Z": Variable("3", "c")}


@pytest.mark.parametrize(
    ("gives", "parts"),
    [
        ({"a": {"X": "1"}, "b": {"X": "2"}}, ["'a' and 'b'", "X two values, '1' and '2'", "in the shell"]),
        ({"a": {"X": 1}}, ["plugin 'a'", "{'X': 1}", "names to strings"]),
        ({"a": ["X=1"]}, ["plugin 'a'", "names to strings"]),
        ({"a": ValueError("no")}, ["plugin 'a'", "ValueError: no"]),
        ({"a": PluginError("say so")}, ["plugin 'a'", "say so"]),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_given_is_told(gives: Mapping[str, object], parts: list[str]) -> None:
    with pytest.raises(PluginError) as caught:
        given_by(loaded(**gives))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_the_source_of_a_value() -> None:
    written = {"plugins.a.variables.X": "instep.toml"}
    assert source("X", Variable("1", "a"), shell={"X": "0"}, written=written) == "shell"
    assert source("X", Variable("1", "a"), shell={}, written=written) == "instep.toml"
    assert source("Y", Variable("1", "a"), shell={}, written=written) == "default of a"


def test_the_shell_wins_and_torchruns_default_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN_A", "shell")
    launch = Launch("x.py", given={"GIVEN_A": "plugin", "GIVEN_B": "plugin", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    for environment in (launch.environment(), launch.server_environment()):
        assert environment["GIVEN_A"] == "shell"
        assert environment["GIVEN_B"] == "plugin"
        assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert replace(launch, given={}).environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize("preload", [True, False])
def test_workers_of_a_job_see_it_from_their_first_moment(preload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fork server the variables are there before it imports anything: a module that it preloads has seen them."""
    install(tmp_path, monkeypatch)
    (tmp_path / "looks.py").write_text("import os\nSEEN = os.environ.get('GIVEN_HERE')\n")
    script = tmp_path / "script.py"
    script.write_text(f"import json, os, looks\njson.dump([looks.SEEN, os.environ['GIVEN_HERE']], open({str(tmp_path / 'out')!r}, 'w'))\n")
    config = Config.model_validate({"plugins": {"giver": {"value": "yes"}}, "preload": ["looks"]})
    outcome = run(Launch(str(script), config=config, warm=(), preload=preload, quiet=True))
    assert outcome.code == 0, outcome.message
    assert json.loads((tmp_path / "out").read_text()) == ["yes", "yes"]


def test_a_disabled_instep_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    on = Launch("x.py", config=Config.model_validate({"plugins": {"giver": {"value": "yes"}}}))
    off = replace(on, config=on.config.model_copy(update={"enabled": False}))
    assert (equipped(on).given, equipped(off).given) == ({"GIVEN_HERE": "yes"}, {})


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a plugin that gives one variable."""
    info = folder / "instep_giver-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: instep-giver\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[instep]\ngiver = given_plugin:Giver\n")
    (folder / "given_plugin.py").write_text(
        "import instep\n\n\nclass Giver(instep.Plugin):\n    value: str\n\n    @instep.hookimpl\n"
        "    def environment(self):\n        return {'GIVEN_HERE': self.value}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    sys.modules.pop("given_plugin", None)
