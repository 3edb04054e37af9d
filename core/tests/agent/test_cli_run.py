"""``instep run``: torchrun's flags and spellings, and bad usage."""

import json
import os
from pathlib import Path

import pytest

from instep.agent.launch import gpus
from instep.cli.main import main
from instep.cli.run import count, parser
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
        (["--nproc-per-node", "2", "--nnodes=1:1", "--node_rank", "0", "--run-path", "--local-ranks-filter", "0,1", "-t", "0"], []),
    ],
)
def test_torchruns_flags(echo: str, tmp_path: Path, flags: list[str], arguments: list[str]) -> None:
    with Cli([*flags, echo, *arguments], tmp_path) as cli:
        code, out, err = cli.end()
    assert code == 0, err
    told = sorted(json.loads(line.partition("] ")[2]) for line in out.splitlines())
    assert [t[:3] for t in told] == [["0", "2", arguments], ["1", "2", arguments]]
    assert told[0][3] == told[1][3]
    assert ("--rdzv-backend, --rdzv-endpoint: not needed" in err) == ("--rdzv_backend" in flags)


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
    assert "incident 1, exit of rank 1: rank 1 was killed by signal 9" in err
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
        (["--no-python", "train.sh"], "--no-python: not supported: a rank is forked from a Python process"),
        (["--numa-binding", "node", __file__], "--numa-binding: not supported; bind the job with numactl"),
        (["--virtual-local-rank", __file__], "--virtual-local-rank: not supported"),
        (["--duplicate-stdout-filters", "loss", __file__], "--duplicate-stdout-filters: not supported; --log-dir keeps all"),
        (["--nnodes", "1:4", __file__], "only one machine"),
        (["--node-rank", "1", __file__], "--node-rank 1: only one machine"),
        (["-r", "3", __file__], "--redirects: say with --log-dir DIR"),
        (["--local-ranks-filter", "1", __file__], "--local-ranks-filter: say with --log-dir DIR"),
        (["--local-ranks-filter", "all", __file__], "--local-ranks-filter all: expected ranks"),
        (["--tee", "5", __file__], "--tee 5: expected 0, 1 (stdout)"),
        (["--redirects", "0:3,1", __file__], "--redirects 0:3,1: expected"),
        (["--shutdown-timeout", "-1", __file__], "deadlines.shutdown"),
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


def test_every_flag_of_torchrun_is_known() -> None:
    """None is refused as unknown: each works, is ignored with a note, or is refused with its reason."""
    torchrun = pytest.importorskip("torch.distributed.run")
    theirs = {option for action in torchrun.get_args_parser()._actions for option in action.option_strings if "_" not in option}
    ours = {option for action in parser()._actions for option in action.option_strings}
    assert len(theirs) > 20
    assert theirs - ours == set()


def test_an_unknown_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["run", "--no-such-flag", __file__])
    assert info.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_count_of_ranks() -> None:
    assert count("3", flag="-n") == 3
    assert count("cpu", flag="-n") == len(os.sched_getaffinity(0))
    assert count("auto", flag="-n") >= 1
    for wrong in ("-1", "xpu"):
        with pytest.raises(UsageError, match=f"-n {wrong}: expected a positive number"):
            count(wrong, flag="-n")


@pytest.mark.parametrize(
    ("listed", "seen"),
    [(None, 3), ("", 0), ("-1", 0), ("0,2", 2), ("0, 1", 2), ("0,7,1", 1), ("GPU-8932f937,GPU-8932f938", 2), ("MIG-1", 1)],
)
def test_gpus_are_those_that_the_script_would_see(tmp_path: Path, listed: str | None, seen: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert gpus(dev=tmp_path, environ=environ) == seen
    assert gpus(dev=tmp_path / "none", environ=environ) == 0


def test_the_first_line_says_what_is_started(echo: str, tmp_path: Path) -> None:
    with Cli(["--nproc-per-node", "2", "--log-dir", "logs", echo], tmp_path) as cli:
        _, _, err = cli.end()
    assert err.splitlines() == ["instep: starting echo_args.py on 2 ranks; plugins: none; logs in logs"]
    with Cli(["--json", "-m", "echo_args"], tmp_path) as cli:
        _, _, err = cli.end()
    assert err == ""


def test_flags_that_mean_nothing_here_say_so(echo: str, tmp_path: Path) -> None:
    flags = ["--monitor-interval", "5", "--start-method=spawn", "--role", "trainer", "--tee", "3", "-r", "1", "--event_log_handler", "null"]
    with Cli([*flags, echo], tmp_path) as cli:
        code, out, err = cli.end()
    assert (code, out.count("[rank 0] ")) == (0, 1)
    notes = [line.removeprefix("instep: ").partition(":")[0] for line in err.splitlines()[:-1]]
    assert notes == ["--role", "--monitor-interval", "--start-method", "--event-log-handler", "--tee", "--redirects"]


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["-r", "0:3"], {1, 2}),
        (["-r3"], set()),
        (["-r", "3", "-t", "1:3"], {1}),
        (["--local-ranks-filter", "0,2"], {0, 2}),
        (["-t3"], {0, 1, 2}),
    ],
)
def test_redirected_output_is_in_the_log_and_not_on_the_console(echo: str, tmp_path: Path, flags: list[str], shown: set[int]) -> None:
    with Cli([*flags, "--nproc-per-node", "3", "--log-dir", "logs", echo], tmp_path) as cli:
        code, out, err = cli.end()
    assert code == 0, err
    assert {int(line.partition("]")[0].removeprefix("[rank ")) for line in out.splitlines()} == shown
    assert [json.loads((tmp_path / "logs" / f"rank-{rank}.log").read_text())[0] for rank in range(3)] == ["0", "1", "2"]


PRINTS = """
import os, sys, time
print("up", flush=True)
deadline = time.monotonic() + 30
while not os.path.exists("closed") and time.monotonic() < deadline:
    time.sleep(0.01)
for i in range(1000):
    print("x" * 100)
open(f"done-{os.environ['RANK']}", "w").close()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--json"], 0), (["--log-dir", "logs"], 3)])
def test_a_closed_pipe_takes_nothing_but_the_output(tmp_path: Path, flags: list[str], code: int) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    with Cli(["--nproc-per-node", "2", *flags, "prints.py", str(code)], tmp_path) as cli:
        assert cli.process.stdout is not None
        assert cli.process.stdout.readline().endswith("up\n")
        cli.process.stdout.close()
        (tmp_path / "closed").touch()
        ended, _, err = cli.end()
    assert ended == code, err
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]
    assert err.count("the ranks' output cannot be written any more (Broken pipe)") == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_nobody_reads_at_all(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "closed").touch()
    with Cli(["--nproc-per-node", "2", "--json", "prints.py", "0"], tmp_path) as cli:
        assert cli.process.stdout is not None
        assert cli.process.stderr is not None
        cli.process.stdout.close()
        cli.process.stderr.close()
        assert cli.process.wait(30) == 0
    assert len(list(tmp_path.glob("done-*"))) == 2
