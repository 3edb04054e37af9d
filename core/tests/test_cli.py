"""The command: exit codes, one message for each error, JSON for machines, and no torch where none is needed."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from instep import drill
from instep.cli import timeline
from instep.cli.drill import parser, split
from instep.cli.main import COMMANDS, main
from instep.injection import POINTS
from instep.model import Attempt, Fault, IncidentReport, Receipt


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def incident(number: int = 1, *, resumed: float | None = 0.12, failed: str | None = None) -> IncidentReport:
    fault = Fault(kind="exit", ranks=(0,), detail="signal 9", detected_by="agent", at=5.0)
    phases = [("quiesce", "core", 0.01, 0), ("reinit_comms", "init_gloo", 0.02, 0), ("restore_state", "state_replica", 0.04, 3_000_000)]
    receipts = tuple(
        Receipt(phase=phase, plugin=plugin, rank=rank, seconds=seconds * (1 if rank else 0.5), bytes=size if rank == 0 else 0)
        for phase, plugin, seconds, size in phases
        for rank in range(2)
    )
    return IncidentReport(
        incident=number,
        fault=fault,
        attempts=(Attempt(incarnation=1, fault=fault, failed_phase=failed), Attempt(incarnation=2, fault=fault)),
        scope="in_process",
        step=20,
        steps_lost=0,
        phases=receipts,
        seconds_to_resume=resumed,
        seconds_to_step=None if resumed is None else resumed + 0.03,
        bytes_moved=3_000_000,
        verified=True,
    )


def write(directory: Path, *incidents: IncidentReport, rest: str = "") -> Path:
    file = directory / "incidents.jsonl"
    file.write_text("".join(i.model_dump_json() + "\n" for i in incidents) + rest, encoding="utf-8")
    return file


def test_bare_instep_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in shown] == []


def test_every_command_has_a_module_behind_it() -> None:
    assert [name for name, command in COMMANDS.items() if find_spec(command.target.partition(":")[0]) is None] == []


def test_the_readme_has_every_command_and_no_other() -> None:
    readme = Path(drill.__file__).parents[2] / "README.md"
    assert set(re.findall(r"^\| `instep (\w+)", readme.read_text(encoding="utf-8"), re.MULTILINE)) == set(COMMANDS)


def test_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu"]) == 2
    assert capsys.readouterr().err == "instep: there is no command 'rnu'; did you mean 'run'?\n"


def test_a_wrong_option_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plugins", "--jsn"])
    assert caught.value.code == 2
    assert "--jsn" in capsys.readouterr().err


def test_a_limit_of_the_machine_is_one_message(empty_directory: Path) -> None:
    (empty_directory / "train.py").write_text("import instep\ninstep.init()\n")
    command = [sys.executable, "-m", "instep", "run", "--nproc-per-node", "4", "train.py"]
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "-", *command]
    run = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("raise the limit of open files (ulimit -n)")
    assert "Traceback" not in run.stderr


def test_plugins_as_json(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    (empty_directory / "instep.toml").write_text("plugins = {init_gloo = false, state_replica = false, ghost = true}", encoding="utf-8")
    assert main(["plugins", "--json"]) == 2
    listed = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert (listed["ghost"]["status"], listed["ghost"]["enabled"]) == ("missing", True)
    assert "not installed" in listed["ghost"]["why"]
    assert all(not line["enabled"] for name, line in listed.items() if name != "ghost")


def test_plugins_imports_neither_torch_nor_any_plugin() -> None:
    program = "import sys; from instep.cli.main import main; main(['plugins']); print(*sorted(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in run.stderr.split()}
    assert "instep" in loaded
    assert not [name for name in loaded if name in {"torch", "numpy"} or name.startswith("instep_")]


@pytest.mark.parametrize("command", [["plugins"], ["check"], ["run", "script.py"], ["drill", "script.py"]], ids=lambda words: words[0])
def test_a_plugin_error_has_one_exit_code_in_every_command(
    command: list[str], capfd: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    (empty_directory / "instep.toml").write_text("plugins = {init_gloo = false, state_replica = false, ghost = true}", encoding="utf-8")
    (empty_directory / "script.py").write_text("", encoding="utf-8")
    assert main(command) == 2
    shown = capfd.readouterr()
    assert "plugin 'ghost' is enabled but not installed" in shown.out + shown.err


def test_check_shows_each_value_and_its_source(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    (empty_directory / "instep.toml").write_text(
        "plugins = {init_gloo = false, state_replica = false}\nlimits.same_fault = 4", encoding="utf-8"
    )
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["file"], report["errors"]) == (True, "instep.toml", [])
    assert report["values"]["limits.same_fault"] == {"value": 4, "source": "instep.toml"}
    assert report["values"]["watchdog.tick"] == {"value": 0.05, "source": "default"}
    assert main(["check"]) == 0
    assert "limits.same_fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "part"),
    [("limit = 1", "unknown key 'limit'"), ("plugins = {init_gloo = false, state_replica = false, ghost = true}", "'ghost'")],
)
def test_check_fails_on_a_wrong_key_and_on_a_wrong_plugin(
    text: str, part: str, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    (empty_directory / "other.toml").write_text(text, encoding="utf-8")
    assert main(["check", "other.toml", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert part in report["errors"][0]
    assert main(["check", "other.toml"]) == 2
    assert part in capsys.readouterr().out


def test_a_wrong_configuration_is_one_message_for_every_command(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    (empty_directory / "instep.toml").write_text("[watchdog]\nstal = 1", encoding="utf-8")
    assert main(["plugins"]) == 2
    assert capsys.readouterr().err == "instep: instep.toml: unknown key 'watchdog.stal'; did you mean 'watchdog.stall'?\n"


def test_report_draws_every_incident(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    write(empty_directory, incident(1), incident(2, failed="restore_state"), incident(3, resumed=None))
    assert main(["report", str(empty_directory)]) == 0
    shown = capsys.readouterr().out
    for part in ("incident 1, exit of rank 0: signal 9", "150.0 ms", "state_replica", "3.0 MB", "0 steps lost"):
        assert part in shown
    assert "attempt 1 failed in restore_state" in shown
    assert shown.rstrip().splitlines()[-1].startswith("3 incidents, to the next step median 150.0 ms")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "  in step again at step 20 after 120.0 ms, next step after 150.0 ms\n  0 steps lost; 3.0 MB moved, verified\n"),
        ({"seconds_to_step": None, "steps_lost": 1}, "  in step again at step 20 after 120.0 ms\n  1 step lost; 3.0 MB moved, verified\n"),
        ({"seconds_to_step": None, "scope": "job"}, "  running again after 120.0 ms\n  the whole job started again\n"),
        ({"seconds_to_step": None, "seconds_to_resume": None}, "  not in step again before the job ended\n"),
    ],
)
def test_report_says_how_far_the_job_came(
    change: dict[str, object], words: str, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    write(empty_directory, incident().model_copy(update=change))
    assert main(["report", "."]) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "never" not in shown
    assert ("1 incident, no step since;" in shown) == (change != {})


@pytest.mark.parametrize(("ranks", "words"), [((), "incident 1, exit: signal 9\n"), ((1, 2), "incident 1, exit of ranks 1, 2: signal 9\n")])
def test_report_names_the_ranks_that_are_known(
    ranks: tuple[int, ...], words: str, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    whole = incident()
    write(empty_directory, whole.model_copy(update={"fault": whole.fault.model_copy(update={"ranks": ranks})}))
    assert main(["report", "."]) == 0
    assert words in capsys.readouterr().out


def test_report_as_json_holds_all(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    file = write(empty_directory, incident(1), incident(2))
    assert main(["report", "--json", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [IncidentReport.model_validate(i) for i in report["incidents"]] == [incident(1), incident(2)]
    assert (report["count"], report["median_seconds_to_step"], report["bytes_moved"]) == (2, 0.15, 6_000_000)


def test_report_on_a_run_without_incidents(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    write(empty_directory)
    assert main(["report", "."]) == 0
    assert capsys.readouterr().out == "no incidents\n"


def test_report_on_a_directory_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == "instep: nowhere does not exist; give the --report-dir of a run\n"


def test_report_passes_over_an_unfinished_last_line_and_refuses_any_other_damage(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    write(empty_directory, incident(1), rest='{"incident": 2, "fau')
    assert main(["report", "."]) == 0
    assert "unfinished" in capsys.readouterr().err
    write(empty_directory, incident(1), rest='{"incident": 2}\n')
    assert main(["report", "."]) == 1
    assert "incidents.jsonl:2: no incident: fault Field required" in capsys.readouterr().err


def test_drill_explains_every_point_that_it_draws(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["drill", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    drawn = {name for choice in drill.ANYWHERE for name in choice.split("|")}
    assert drawn == set(drill.points())
    assert [name for name in drawn if f"  {name:<12}{POINTS[name]}\n" not in shown] == []


def test_every_point_in_the_code_is_in_the_table() -> None:
    core = Path(drill.__file__).parent
    session = [file for file in core.rglob("*.py") if "testing" not in file.parts]
    sources = [*session, *core.parents[1].glob("plugins/*/instep_*/**/*.py")]
    used = {name for file in sources for name in re.findall(r"\b(?:point|fire|at)\(\"(\w+)\"", file.read_text(encoding="utf-8"))}
    assert used == set(POINTS)


@pytest.mark.parametrize(
    "words",
    [["--ranks", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node", "3"], ["--nproc-per-node=3"], ["--kill", "1@2", "--ranks=3"]],
)
def test_drill_takes_the_number_of_ranks_under_both_names(words: list[str]) -> None:
    options, script = split([*words, "script.py", "--ranks", "9"])
    assert parser().parse_args(options).ranks == "3"
    assert script == ["script.py", "--ranks", "9"]


@pytest.mark.parametrize(
    ("words", "why"), [(["--ranks", "0"], "--ranks 0: expected a positive number"), (["--kill", "4@1"], "ranks 0 to 3")]
)
def test_drill_refuses_ranks_that_cannot_be(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["drill", *words])
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_bars_follow_one_another_and_fill_the_time_to_the_first_step() -> None:
    drawn = timeline.bars(incident())
    assert [bar.phase for bar in drawn] == ["detect, unwind", "quiesce", "reinit_comms", "restore_state", "first step"]
    assert [round(bar.start, 6) for bar in drawn] == [0.0, 0.05, 0.06, 0.08, 0.12]
    assert round(drawn[-1].start + drawn[-1].seconds, 6) == 0.15
    assert drawn[3].bytes == 3_000_000
    assert timeline.bars(incident(resumed=None))[0].phase == "quiesce"


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "12.3 ms"), (0.9999, "999.9 ms"), (2.5, "2.50 s")])
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert timeline.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (2_000_000_000, "2.0 GB"), (3 * 10**12, "3.0 TB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert timeline.size(count) == text
