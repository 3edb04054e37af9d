"""``instep new`` writes a plugin that installs and passes, and a contract that finds what its author may get wrong."""

import re
from pathlib import Path

import pytest

from instep.cli.main import main
from tests.packaging.environments import Environment, everything
from tests.packaging.mistakes import LEFT, MISTAKES, Mistake, plant

pytestmark = pytest.mark.timeout(300)  # pip, and fresh interpreters that import torch, on a busy machine
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, Path]:
    """A generated project, installed editable, and its environment."""
    home = tmp_path_factory.mktemp("new")
    assert main(["new", "mydetector", "--directory", str(home)]) == 0
    environment = Environment(home / "env", everything())
    environment.install("-e", home / "mydetector", options=["--no-deps"])
    return environment, home / "mydetector"


def test_what_it_writes_installs_loads_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mydetector", "--directory", str(tmp_path)]) == 0
    assert "pip install" in capsys.readouterr().out
    environment = Environment(tmp_path / "env", everything())
    environment.install(tmp_path / "mydetector")
    listed = environment.run("-m", "instep", "plugins", cwd=tmp_path)
    assert re.search(r"mydetector\s+off\s+mydetector\s+0\.1\.0\s+1\s+start, detect, quiesce,? close", re.sub(r"\s+", " ", listed)), listed
    shown = environment.run(*PYTEST, "mydetector", cwd=tmp_path)
    assert re.search(r"\d\d passed, 1 skipped", shown), shown
    assert "implements none of reinit_comms, restore_state, resume_data" in shown


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name.replace(" ", "-"))
def test_a_mistake_fails_the_contract_by_name(project: tuple[Environment, Path], mistake: Mistake) -> None:
    environment, root = project
    _expect(environment, root, mistake, "-k", mistake.law)


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name.replace(" ", "-"))
def test_a_mistake_fails_the_whole_contract_by_name(project: tuple[Environment, Path], mistake: Mistake) -> None:
    environment, root = project
    _expect(environment, root, mistake, "-k", "TestMydetector")


def _expect(environment: Environment, root: Path, mistake: Mistake, *selection: str) -> None:
    plugin = root / "mydetector" / "plugin.py"
    good = plugin.read_text(encoding="utf-8")
    plugin.write_text(plant(good, mistake), encoding="utf-8")
    try:
        shown = environment.run(*PYTEST, "tests", *selection, cwd=root, code=1)
    finally:
        plugin.write_text(good, encoding="utf-8")
        for file in Path("/dev/shm").glob(f"{LEFT}*"):
            file.unlink()
    assert [part for part in mistake.says if part not in shown] == [], shown


@pytest.mark.parametrize(
    ("name", "part"),
    [("My-Detector", "small letters"), ("class", "small letters"), ("json", "another Python module"), ("init_gloo", "installed already")],
)
def test_a_name_that_is_no_good_is_refused(name: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", name, "--directory", str(tmp_path)]) == 2
    assert part in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["new", "mine", "--directory", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
