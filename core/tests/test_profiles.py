"""``instep check --profile``: found by metadata, given what workers would see, and an exit code that is 0 only when all is well."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from instep import profiles
from instep.cli.main import main
from instep.config import suggest
from instep.errors import PluginError, UsageError
from instep.profiles import Inspection

NO_PLUGINS = "plugins = {init_gloo = false, state_replica = false}\n"
FINE = """
    from instep.profiles import Finding
    def profile(inspection):
        yield Finding("thing", "3", "here", "ok", "it matters", None)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with the profile ``mine`` on the path, and a configuration without plugins beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "instep.toml").write_text(NO_PLUGINS)

    def put(source: str) -> None:
        info = tmp_path / "house_rules-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-rules\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text("[instep.profiles]\nmine = house_rules:profile\n")
        (tmp_path / "house_rules.py").write_text(textwrap.dedent(source))
        sys.modules.pop("house_rules", None)
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


def test_a_profile_is_found_by_name_and_only_it_is_imported(install: Install) -> None:
    install("raise SystemExit('imported')")
    assert "mine" in profiles.installed()
    with pytest.raises(UsageError, match=r"no profile 'mime'; did you mean 'mine'"):
        profiles.inspect("mime", Inspection({}))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("def profile(inspection):\n    yield 1 / 0\n", ["'mine'", "house-rules 2.0", "ZeroDivisionError"]),
        ("import no_such_thing\n", ["'mine'", "house-rules 2.0", "No module named 'no_such_thing'"]),
    ],
)
def test_a_broken_profile_is_named_with_its_distribution(source: str, parts: list[str], install: Install) -> None:
    install(source)
    with pytest.raises(PluginError) as caught:
        profiles.inspect("mine", Inspection({}))
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 1), ("fail", 1)])
def test_zero_only_when_all_is_well(status: str, code: int, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(FINE.replace('"ok", "it matters", None', f'"{status}", "it matters", "do this"'))
    assert main(["check", "--profile", "mine"]) == code
    shown = capsys.readouterr().out
    assert [part for part in (f"{status:4}  thing: 3  (here)", "it matters", "remedy: do this", f"1 {status}") if part not in shown] == []
    assert main(["check", "--profile", "mine", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["profile"], report["errors"]) == (code == 0, "mine", [])
    finding = {"what": "thing", "value": "3", "source": "here", "status": status, "why": "it matters", "remedy": "do this"}
    assert report["findings"] == [finding]


def test_an_unknown_profile_is_bad_usage(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(FINE)
    assert main(["check", "--profile", "yours"]) == 2
    assert "there is no profile 'yours'" in capsys.readouterr().err


def test_a_name_with_dots_is_one_name() -> None:
    assert suggest("hyperpod-1.0", ["efa", "hyperpod-1.0.0"], nested=False) == "did you mean 'hyperpod-1.0.0'?"
    assert suggest("nothing", ["efa", "hyperpod-1.0.0"], nested=False) == "known are efa, hyperpod-1.0.0"


def test_a_wrong_configuration_comes_before_the_profile(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(FINE)
    Path("instep.toml").write_text("limit = 1\n")
    assert main(["check", "--profile", "mine", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["findings"]) == (False, [])
    assert "unknown key 'limit'" in report["errors"][0]


def test_a_profile_sees_the_environment_of_workers(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell's value above the plugin's, the configuration's above the plugin's own, each with its source."""
    install(
        """
        from instep.profiles import Finding
        def profile(inspection):
            for name in ("GIVEN_A", "GIVEN_B", "GIVEN_C"):
                yield Finding(name, inspection.environ[name], inspection.sources[name], "ok", "")
        """
    )
    (tmp_path / "house_rules-2.0.dist-info" / "entry_points.txt").write_text(
        "[instep]\ngiver = house_giver:Giver\n[instep.profiles]\nmine = house_rules:profile\n"
    )
    (tmp_path / "house_giver.py").write_text(
        "import instep\n\n\nclass Giver(instep.Plugin):\n    variables: dict[str, str] = {}\n\n    @instep.hookimpl\n"
        "    def environment(self):\n        return dict.fromkeys(('GIVEN_A', 'GIVEN_B', 'GIVEN_C'), 'own') | self.variables\n"
    )
    sys.modules.pop("house_giver", None)
    (tmp_path / "instep.toml").write_text(
        '[plugins]\ninit_gloo = false\nstate_replica = false\n[plugins.giver.variables]\nGIVEN_A = "file"\nGIVEN_B = "file"\n'
    )
    monkeypatch.setenv("GIVEN_A", "mine")
    assert main(["check", "--profile", "mine", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    seen = {finding["what"]: (finding["value"], finding["source"]) for finding in report["findings"]}
    expected = {"GIVEN_A": ("mine", "shell"), "GIVEN_B": ("file", "instep.toml"), "GIVEN_C": ("own", "default of giver")}
    assert seen == expected
    values = {name: report["values"][f"environment.{name}"] for name in expected}
    assert {name: (told["value"], told["source"]) for name, told in values.items()} == expected
