"""The reference against the code: hooks, configuration keys, options, fields of JSON, exit codes, and links between pages."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from instep import config
from instep.cli.main import BAD_USAGE, COMMANDS, INTERRUPTED, main
from instep.cli.plan import Answer
from instep.cli.report import Summary
from instep.discovery import Listing
from instep.drill import Verdict
from instep.forecast import Forecast
from instep.hooks import HOOKS
from instep.model import Attempt, Fault, IncidentReport, Receipt
from instep.testing import Jobs, Script

from .pages import DOCS, PAGES, ROOT

pytestmark = pytest.mark.timeout(180)
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_hook_is_documented_tested_and_shown(generate: ModuleType) -> None:
    """That a contract calls it and a plugin implements it is held in core/tests/testing/test_shown.py; here, that the tables say so."""
    rows = {row[0]: row[1:] for row in re.findall(r"^\| \[`(\w+)`\]\[[^]]+\] \| `(\w+)` \| (.+) \|$", generate.shown(), re.MULTILINE)}
    assert tuple(rows) == HOOKS
    assert all(contract.endswith("Contract") and by.strip("` ") for contract, by in rows.values())
    assert re.findall(r"^\| \[`(\w+)`\]", generate.hooks(), re.MULTILINE) == list(HOOKS)
    assert "::: instep.hooks.Plugin\n" in (REFERENCE / "hooks.md").read_text()


def test_every_key_of_the_configuration_is_there(generate: ModuleType) -> None:
    keys = [key for key in config._known_keys() if key.partition(".")[0] != "drill"]
    tables = {key.partition(".")[0] for key in keys if "." in key}
    written = re.findall(r"^\| `([\w.]+)` \| `.+` \| \S", generate.configuration(), re.MULTILINE)
    assert sorted(written) == sorted(set(keys) - tables)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_there(name: str, generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    told = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out.partition("torchrun's flags:")[0]))
    (part,) = [text for text in generate.commands().split("\n## ") if f"{{#{name}}}" in text]
    assert {option for option in told if f"`{option}`" not in part and option not in part.partition("```text")[2]} == set()


def test_pages_ask_for_what_there_is_and_nothing_is_left_over(generate: ModuleType) -> None:
    assert {name for page in PAGES for name in generate.MARK.findall(page.read_text())} == set(generate.GENERATORS)


def documented(anchor: str) -> set[str]:
    """The keys in the table of one section of the JSON reference."""
    text = (REFERENCE / "json.md").read_text()
    (section,) = [part for part in re.split(r"^#+ ", text, flags=re.MULTILINE) if f"{{#{anchor}}}" in part.partition("\n")[0]]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("anchor", "model"),
    [
        ("report", Summary),
        ("drill", Verdict),
        ("incident", IncidentReport),
        ("fault", Fault),
        ("attempt", Attempt),
        ("receipt", Receipt),
        ("plan", Answer),
        ("loss", Forecast),
    ],
)
def test_every_field_of_a_model_is_there(anchor: str, model: type[IncidentReport]) -> None:
    assert documented(anchor) == set(model.model_fields)


def test_every_key_that_a_command_prints_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert documented("plugins") == set(Listing.__dataclass_fields__)
    for command in (["check"], ["new", "mine"]):
        assert main([*command, "--json"]) == 0
        assert documented(command[0]) == set(json.loads(capsys.readouterr().out))


def ends(tmp_path: Path, body: str, *, signum: int | None = None) -> tuple[int, str]:
    """Exit code and output of a plain script under ``instep run``, which gets a signal once the script has printed something."""
    script = tmp_path / "script.py"
    script.write_text(body)
    command = [sys.executable, "-m", "instep", "run", "--no-preload", "--json", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        if signum is not None:
            process.stdout.readline()
            process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
    return process.returncode, out


WAIT = "import time\nprint('here', flush=True)\ntime.sleep(120)\n"


@pytest.mark.parametrize(
    ("body", "signum", "code"),
    [
        ("", None, 0),
        ("raise SystemExit(7)", None, 7),
        ("import os\nos.kill(os.getpid(), 9)", None, 128 + 9),
        (WAIT, signal.SIGTERM, 143),
        (WAIT, signal.SIGINT, INTERRUPTED),
    ],
)
def test_exit_codes_of_a_run_are_the_documented_ones(body: str, signum: int | None, code: int, tmp_path: Path) -> None:
    got, out = ends(tmp_path, body, signum=signum)
    assert got == code
    last = json.loads(out.splitlines()[-1])
    assert last["exit"] == code
    assert documented("run") == set(last)
    codes = re.findall(r"^\| (\d+|another) \|", (REFERENCE / "exit-codes.md").read_text(), re.MULTILINE)
    assert (str(code) if code not in {7, 137} else "another") in codes
    assert str(BAD_USAGE) in codes


def test_giving_up_is_70(job: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import instep\nsession = instep.init()\n@session.recoverable\ndef train():\n    raise ValueError('a bug')\ntrain()\n"
    )
    outcome = job.run(Script(str(script), ranks=2, steps=None)).outcome
    assert outcome.code == 70
    assert "a bug" in outcome.message
    assert "\n| 70 | `run` |" in (REFERENCE / "exit-codes.md").read_text()


def slug(title: str) -> str:
    """The anchor that Markdown's toc gives to a heading."""
    if match := re.search(r"\{#([\w-]+)\}", title):
        return match[1]
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page: Path, generate: ModuleType) -> None:
    """mkdocs checks them too, where it is installed (`make docs`)."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file in PAGES, f"{page.relative_to(ROOT)}: {target} leads nowhere in docs/"
        if anchor:
            whole = generate.on_page_markdown(file.read_text())
            assert anchor in {slug(title) for title in re.findall(r"^#+ (.+)$", whole, re.MULTILINE)}, f"{target}: no such heading"


def test_the_table_of_plugins_shows_their_hooks(generate: ModuleType) -> None:
    there = {name: set(hooks) for name, hooks in generate.of_this_clone().items()}
    rows = re.findall(r"^\| \[`(\w+)`\]\(#[\w-]+\) \| ([`\w ]+) \|", (DOCS / "how-to" / "plugins.md").read_text(), re.MULTILINE)
    assert {name: set(hooks.replace("`", "").split()) for name, hooks in rows} == there


@pytest.mark.parametrize(
    ("ours", "theirs"), [("| instep |", "first step that all ranks have committed"), ("| torchrun,", "torchrun's restart")]
)
def test_figures_measured_here_are_those_of_the_readme(ours: str, theirs: str) -> None:
    lines = (DOCS / "explanation" / "peers.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(ours) and "measured here:" in line]
    (figure,) = re.findall(r"\d+\.\d+ s", row)
    (told,) = [line for line in (ROOT / "README.md").read_text().splitlines() if theirs in line]
    assert f"| {figure}" in told


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES if page.parent.name != "decisions"}
