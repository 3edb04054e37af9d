"""What a script sees of its interpreter: under the fork server the same as under torchrun, item by item."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep.agent.agent import run
from instep.agent.task import WARM

from .jobs import launch

FACTS = Path(__file__).with_name("facts.py")
SAME = (
    *("name", "file", "spec", "main is this module", "class module", "first on path", "rest of path", "cwd", "environment of C"),
    *("start method", "child's parent", "process name", "signals", "mask", "umask", "files", "main thread", "threads", "torch threads"),
    *("torch default dtype", "grad", "gc", "streams", "same streams", "event loop", "flags", "group leader", "stdin", "executable"),
    "os threads",
)
OURS = {"INSTEP_CHANNEL", "INSTEP_BIRTH", "SPARE"}
THEIRS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"}
"""Set by torchrun for its own machinery: an error file, signals of its agent, a store that its agent hosts."""
PYTESTS = {"PYTEST_CURRENT_TEST", "LINES", "COLUMNS"}
Facts = Mapping[str, Any]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FACTS), str(folder), "x y"]
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, capture_output=True)
    return read(folder)


@pytest.fixture(scope="module", params=["forked", "spare", "plain"])
def instep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    folder, spare = tmp_path_factory.mktemp(request.param), request.param == "spare"
    job = launch(str(FACTS), str(folder), "x y", nproc=2, preload=request.param != "plain", max_restarts=int(spare))
    outcome = run(replace(job, warm=WARM, env={"SPARE": "1"} if spare else {}))
    assert outcome.code == 0, outcome.message
    told = read(folder)
    if spare:
        assert (folder / "spare").read_text() in {str(facts["pid"]) for facts in told}
    return told


def read(folder: Path) -> list[Facts]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("item", SAME)
def test_the_same_as_under_torchrun(torchrun: list[Facts], instep: list[Facts], item: str) -> None:
    assert [facts[item] for facts in instep] == [facts[item] for facts in torchrun]


def test_arguments(torchrun: list[Facts], instep: list[Facts]) -> None:
    assert [facts["argv"][0::2] for facts in instep] == [facts["argv"][0::2] for facts in torchrun]


def test_environment(torchrun: list[Facts], instep: list[Facts]) -> None:
    for ours, theirs in zip(instep, torchrun, strict=True):
        env, expected = ({k: v for k, v in facts["environment"].items() if k not in PYTESTS} for facts in (ours, theirs))
        assert set(env) - OURS == set(expected) - THEIRS
        different = {name for name in set(env) & set(expected) if env[name] != expected[name]}
        assert different <= {"MASTER_ADDR"} | ({"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"} if "SPARE" in env else set())
        assert env["MASTER_ADDR"] == "127.0.0.1"


def test_every_rank_draws_its_own_random_numbers(instep: list[Facts]) -> None:
    for one, other in zip(instep[0]["draws"], instep[1]["draws"], strict=True):
        assert one != other
    assert instep[0]["seed"] != instep[1]["seed"]


def test_ranks_have_names_and_die_before_the_agent_when_memory_is_short(instep: list[Facts]) -> None:
    mine = int(Path("/proc/self/oom_score_adj").read_text())
    for rank, facts in enumerate(instep):
        assert facts["comm"] == f"instep-rank-{rank}"
        assert facts["cmdline"].startswith(f"instep-rank-{rank} ")
        assert facts["oom"] > mine


def test_a_rank_inherits_nothing_but_its_streams_and_its_channel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, json\n"
        "fds = sorted(int(f) for f in os.listdir('/proc/self/fd'))\n"
        "held = [f for f in fds if os.path.exists(f'/proc/self/fd/{f}') or os.path.islink(f'/proc/self/fd/{f}')]\n"
        "print(json.dumps({'held': held, 'channel': os.environ['INSTEP_CHANNEL']}))\n"
    )
    outcome = run(launch(str(script), nproc=2, log_dir=str(tmp_path)))
    assert outcome.code == 0
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank-{rank}.log").read_text())
        assert seen["held"] == [0, 1, 2, *sorted(map(int, seen["channel"].split(",")))]


def test_modules_packages_and_folders_run_as_under_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print('package', __name__, sys.argv[0].endswith('__main__.py'), sys.argv[1:])")
    (package / "sub.py").write_text("import sys; print('module', __name__, __package__, sys.argv[0].endswith('sub.py'))")
    monkeypatch.chdir(tmp_path)
    for name, module, text in (
        ("pack", True, "package __main__ True ['a']"),
        ("pack.sub", True, "module __main__ pack True"),
        ("pack", False, "package __main__ False ['a']"),
    ):
        logs = tmp_path / f"{name}-{module}"
        assert run(launch(name, "a", nproc=1, module=module, log_dir=str(logs))).code == 0
        assert (logs / "rank-0.log").read_text().strip() == text


def test_a_script_started_in_another_folder_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'")
    (tmp_path / "script.py").write_text("import neighbour; print(neighbour.WORD)")
    assert Path.cwd() != tmp_path
    assert run(launch(str(tmp_path / "script.py"), nproc=1, log_dir=str(tmp_path))).code == 0
    assert (tmp_path / "rank-0.log").read_text() == "found\n"


def test_preloaded_threads_mean_plain_interpreters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "threaded.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    (tmp_path / "script.py").write_text("import os; print(os.getppid())")
    job = launch(str(tmp_path / "script.py"), nproc=1, settings={"preload": ["threaded"]}, log_dir=str(tmp_path), quiet=False)
    assert run(job).code == 0
    assert "preloaded modules started threads" in capsys.readouterr().err
    assert int((tmp_path / "rank-0.log").read_text()) == os.getpid()


def test_a_preloaded_module_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "script.py").touch()
    assert run(launch(str(tmp_path / "script.py"), nproc=1, settings={"preload": ["broken"]}, quiet=False)).code == 0
    assert "broken: ZeroDivisionError" in capsys.readouterr().err
