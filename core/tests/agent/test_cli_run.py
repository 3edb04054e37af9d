"""``instep run``: torchrun's flags and spellings, and bad usage."""

import json
import os
from pathlib import Path

import pytest

from instep.cli.main import main
from instep.cli.run import ranks
from instep.errors import UsageError

from .jobs import FAKE, Cli

ECHO = "import json, os, sys\nprint(json.dumps([os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], os.environ['MASTER_PORT']]))\n"


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo_args.py").write_text(ECHO)
    return "echo_args.py"


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (["--nproc-per-node", "2"], ["--nproc-per-node", "9", "-m", "--", "x"]),
        (["--nproc_per_node=2", "--standalone"], []),
        (
            ["--nproc_per_node", "2", "--nnodes", "1", "--rdzv_backend", "c10d", "--rdzv-endpoint=localhost:0", "--max_restarts=3"],
            ["--a_b"],
        ),
        (["--nproc-per-node", "2", "--"], ["-x"]),
    ],
)
def test_torchruns_flags(echo: str, tmp_path: Path, flags: list[str], arguments: list[str]) -> None:
    with Cli([*flags, echo, *arguments], tmp_path) as cli:
        code, out, err = cli.end()
    assert code == 0, err
    told = sorted(json.loads(line.partition("] ")[2]) for line in out.splitlines())
    assert [t[:3] for t in told] == [["0", "2", arguments], ["1", "2", arguments]]
    assert told[0][3] == told[1][3]
    assert ("--rdzv-backend, --rdzv-endpoint: not needed" in err) == (len(flags) > 5)


def test_module_and_master_port(echo: str, tmp_path: Path) -> None:
    with Cli(["--master-port", "29123", "-m", "echo_args", "a"], tmp_path) as cli:
        code, out, _ = cli.end()
    assert code == 0
    assert json.loads(out.partition("] ")[2]) == ["0", "1", ["a"], "29123"]


def test_json_is_the_last_line_and_reports_are_kept(tmp_path: Path) -> None:
    with Cli(["--nproc-per-node", "3", "--json", "--report-dir", "reports", FAKE, "80", "kill@1@5"], tmp_path) as cli:
        code, out, err = cli.end()
    assert code == 0, err
    assert json.loads(out.splitlines()[-1]) == {"exit": 0, "incidents": 1, "steps": 80}
    assert len((tmp_path / "reports" / "incidents.jsonl").read_text().splitlines()) == 1
    assert "incident 1: exit of rank 1" in err
    assert "[rank 1] welcome 1" in out


def test_the_log_of_the_rank_that_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('what')")
    with Cli(["--nproc-per-node", "2", "--log-dir", "logs", "broken.py"], tmp_path) as cli:
        code, _, err = cli.end()
    assert code == 1
    assert "exited with code 1" in err
    assert f"logs{os.sep}rank-" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no such script: nowhere.py"),
        (["-m", "no.such.module"], "no module named 'no.such.module'"),
        ([], "no script given"),
        (["--nnodes", "2", __file__], "only one machine"),
        (["--nproc-per-node", "zero", __file__], "expected a positive number"),
        (["--nproc-per-node", "0", __file__], "expected a positive number"),
        (["--max-restarts", "-1", __file__], "cannot be negative"),
        (["--config", "missing.toml", __file__], "missing.toml"),
        (["--report-dir", "/proc/no", __file__], "--report-dir /proc/no"),
        (["--log-dir", "/proc/no", __file__], "cannot write logs to /proc/no"),
    ],
)
def test_bad_usage_is_one_message_and_exit_two(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "instep.toml").write_text("[plugins]\ninit_gloo = false\nstate_replica = false\n")
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_unknown_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["run", "--no-such-flag", __file__])
    assert info.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_ranks() -> None:
    assert ranks("3") == 3
    assert ranks("cpu") == len(os.sched_getaffinity(0))
    assert ranks("auto") >= 1
    with pytest.raises(UsageError, match="expected a positive number"):
        ranks("-1")
