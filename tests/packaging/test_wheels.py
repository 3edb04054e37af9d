"""Wheels and sdists of every distribution, and each extra installed alone into a fresh environment."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.cli.main import COMMANDS
from tests.packaging.environments import PATIENCE, ROOT, Environment, without

pytestmark = pytest.mark.timeout(300)  # pip, and fresh interpreters that import torch, on a busy machine
PROJECTS = {
    "instep": ROOT,
    **{f"instep-{p.name.replace('_', '-')}": p for p in sorted(ROOT.glob("plugins/*")) if (p / "pyproject.toml").exists()},
}
EVERY_HELP = """
import contextlib, io, json
from instep.cli.main import COMMANDS, main
codes = {}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            main([name, "--help"])
        except SystemExit as end:
            codes[name] = end.code if shown.getvalue().startswith("usage") else "no usage"
print(json.dumps(codes))
"""
WHAT_IS_THERE = """
import json, sys
from instep import config, discovery, plugins
from instep.cli.main import main
found = sorted(discovery.installed())
loaded = sorted(plugins.load(config.load().config).names)
print(json.dumps({"installed": found, "loaded": loaded, "check": main(["check"]), "torch": "torch" in sys.modules}))
"""
TORCH = ("torch", "numpy", "xxhash", "functorch", "safetensors")
TOOLS = ("dev", "docs")
"""Extras for people who work on the clone."""


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


PLUGINS = sorted(name.removeprefix("instep-") for name in PROJECTS if "instep" in project(name).get("entry-points", {}))
ADAPTERS = sorted({name.removeprefix("instep-") for name in PROJECTS if name != "instep"} - set(PLUGINS))
"""Distributions without hooks, which a script uses by itself, beside a framework that it has chosen."""


def build(source: Path, target: Path, *kinds: str) -> None:
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *(word for kind in kinds for word in ("-t", kind))]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist of every distribution."""
    out = tmp_path_factory.mktemp("dist")
    for source in PROJECTS.values():
        build(source, out, "wheel", "sdist")
    return out


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Callable[[str], Environment]:
    """Makes environments with one requirement, from the built wheels alone; torch and the like are shared unless it is bare."""
    home = tmp_path_factory.mktemp("environments")
    shared = without(home / "shared", lambda _: False)
    bare = without(home / "bare", lambda name: name.lower().startswith(TORCH))

    def make(requirement: str) -> Environment:
        name = re.sub(r"\W+", "-", requirement).strip("-")
        environment = Environment(home / name, [bare if requirement == "instep" else shared])
        environment.install(requirement, options=["--find-links", str(dist)])
        return environment

    return make


def wheel(dist: Path, name: str) -> Path:
    (found,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return found


@pytest.mark.parametrize("name", PROJECTS)
def test_wheel_and_sdist_hold_what_they_should(dist: Path, name: str) -> None:
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        files = set(archive.namelist())
        metadata = archive.read(next(f for f in files if f.endswith(".dist-info/METADATA"))).decode()
    package = "instep" if name == "instep" else name.replace("-", "_")
    assert f"{package}/py.typed" in files
    strangers = [f for f in files if not f.startswith((f"{package}/", f"{package}-{project(name)['version']}.dist-info/"))]
    assert strangers == []
    assert not [f for f in files if f.endswith((".pyc", ".toml")) or ("/tests/" in f and "/template/" not in f)]
    source = PROJECTS[name] / ("core" if name == "instep" else "") / package
    written = {p.relative_to(source.parent) for p in source.rglob("*") if p.is_file()}
    assert {str(p) for p in written if not any(part.startswith((".", "__pycache__")) for part in p.parts[:-1])} <= files
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    (sdist,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(sdist) as packed:
        assert not [m for m in packed.getnames() if "__pycache__" in m or "/.venv" in m or "/shared/" in m]


@pytest.mark.full
@pytest.mark.parametrize("name", PROJECTS)
def test_an_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path, name: str) -> None:
    (sdist,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "out", "wheel")
    one, other = zipfile.ZipFile(wheel(dist, name)), zipfile.ZipFile(wheel(tmp_path / "out", name))
    with one, other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        differing = [f for f in one.namelist() if one.read(f) != other.read(f)]
    assert differing == []


def test_all_have_one_version_and_fit_each_other() -> None:
    versions = {name: project(name)["version"] for name in PROJECTS}
    assert set(versions.values()) == {importlib.metadata.version("instep")}
    major, minor = (int(part) for part in versions["instep"].split(".")[:2])
    for name in PROJECTS:
        if name != "instep":
            assert f"instep[torch]>={major}.{minor},<{major}.{minor + 1}" in project(name)["dependencies"], name


def test_every_plugin_has_an_extra_and_names_that_agree() -> None:
    extras = project("instep")["optional-dependencies"]
    assert [extras[name] for name in [*PLUGINS, *ADAPTERS]] == [[f"instep-{name}"] for name in [*PLUGINS, *ADAPTERS]]
    for plugin in PLUGINS:
        (entry,) = project(f"instep-{plugin}")["entry-points"]["instep"].items()
        assert entry[0] == plugin.replace("-", "_")
        assert entry[1].startswith(f"instep_{entry[0]}.plugin:")
    assert extras["all"] == [f"instep[{','.join(re.findall(r'[a-z-]+', extras['all'][0].partition('[')[2]))}]"]
    assert sorted(re.findall(r"[a-z-]+", extras["all"][0].partition("[")[2])) == PLUGINS


def test_core_alone_works_without_torch(make: Callable[[str], Environment], tmp_path: Path) -> None:
    environment = make("instep")
    found = environment.ask("[importlib.util.find_spec(n) is not None for n in ('torch', 'numpy')]", cwd=tmp_path, imports="importlib.util")
    assert found == [False, False]
    modules = "instep, instep.plugins, instep.lifecycle, instep.agent.agent, instep.cli.main, instep.testing, instep.testing.pytest_plugin"
    assert environment.ask("instep.__version__", cwd=tmp_path, imports=modules) == importlib.metadata.version("instep")
    shown = environment.run("-m", "instep", "plugins", cwd=tmp_path, code=2)
    assert "pip install 'instep[init-gloo]'" in shown
    (tmp_path / "instep.toml").write_text("plugins = {init_gloo = false, state_replica = false}", encoding="utf-8")
    assert "no plugin is installed" in environment.run("-m", "instep", "plugins", "--config", "instep.toml", cwd=tmp_path, code=None)
    environment.run("-m", "instep", "check", cwd=tmp_path)
    environment.run("-m", "instep", "new", "mine", cwd=tmp_path)
    assert (tmp_path / "mine" / ".gitignore").exists()
    told = environment.run("-c", EVERY_HELP, cwd=tmp_path).splitlines()[-1]
    assert json.loads(told) == dict.fromkeys(COMMANDS, 0)


@pytest.mark.parametrize("extra", [extra for extra in project("instep")["optional-dependencies"] if extra not in TOOLS])
def test_an_extra_brings_exactly_what_it_names(make: Callable[[str], Environment], tmp_path: Path, extra: str) -> None:
    environment = make(f"instep[{extra}]")
    wanted = PLUGINS if extra == "all" else [extra] if extra in PLUGINS else []
    table = ", ".join(f"{plugin.replace('-', '_')} = {'true' if plugin in wanted else 'false'}" for plugin in PLUGINS)
    (tmp_path / "instep.toml").write_text(f"plugins = {{{table}}}", encoding="utf-8")
    told = json.loads(environment.run("-c", WHAT_IS_THERE, cwd=tmp_path).splitlines()[-1])
    names = sorted(plugin.replace("-", "_") for plugin in wanted)
    assert told == {"installed": names, "loaded": names, "check": 0, "torch": False}
    if extra == "testing":
        (tmp_path / "test_it.py").write_text(
            "def test_it(faults):\n    assert len(faults.kill(rank=1).at(step=2)) == 1\n", encoding="utf-8"
        )
        assert "1 passed" in environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)


@pytest.mark.full
def test_a_job_recovers_from_wheels_alone(make: Callable[[str], Environment], tmp_path: Path) -> None:
    environment = make("instep[init-gloo,state-replica]")
    shown = environment.run("-m", "instep", "drill", "--ranks", "3", "--steps", "8", "--kill", "1@4", cwd=tmp_path)
    assert "bitwise equal" in shown


@pytest.mark.full
def test_a_detector_is_written_and_tested_without_torch(dist: Path, tmp_path: Path) -> None:
    """The kit asks for torch only where hooks need tensors."""
    bare = without(tmp_path / "bare", lambda name: name.lower().startswith(TORCH))
    environment = Environment(tmp_path / "env", [bare])
    environment.install("instep[testing]", options=["--find-links", str(dist)])
    told = json.loads(environment.run("-m", "instep", "new", "mine", "--json", cwd=tmp_path))
    assert "tests/test_contract.py" in told["files"]
    environment.install(tmp_path / "mine")
    assert re.search(r"\d\d passed, 1 skipped", environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "mine", cwd=tmp_path))
