"""How a job ends when its agent is told to, is killed, or is stopped for a while: never with a process left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from .jobs import FAKE, Cli, alive, descendants, soon, until

FAMILY = """
import multiprocessing, os, signal, subprocess, sys, time
def child():
    time.sleep(100)
if __name__ == "__main__":
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif "polite" in sys.argv:
        def leave(signum, frame):
            print("goodbye", signum, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
    if "polite" not in sys.argv:
        own = multiprocessing.Process(target=child, daemon=True)
        own.start()
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print("up", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A script whose ranks have children of their own, one forked and one started, unless they are polite."""
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    return script


def started(cli: Cli, logs: Path, ranks: int = 2, word: str = "up") -> list[int]:
    """Wait until every rank is up; all processes of the job."""
    files = [logs / f"rank-{rank}.log" for rank in range(ranks)]
    until(lambda: all(f.exists() and word in f.read_text() for f in files), what="all ranks to be up")
    return descendants(cli.process.pid)


@pytest.mark.parametrize("flags", [[], ["--no-preload"]])
def test_kill_nine_of_the_agent_leaves_nothing_behind(family: Path, tmp_path: Path, flags: list[str]) -> None:
    with Cli([*flags, "--nproc-per-node", "2", "--log-dir", "logs", str(family)], tmp_path) as cli:
        pids = started(cli, tmp_path / "logs")
        assert len(pids) >= 6
        if flags:
            pids = [p for p in pids if "time.sleep(100)" not in Path(f"/proc/{p}/cmdline").read_text()]
        cli.process.kill()
        until(lambda: not alive(pids), soon(), "every process of the job to be gone")
    # The loader's folder belongs to the user; another job on this machine may have made it.
    assert [name for name in os.listdir("/dev/shm") if "instep" in name and not name.startswith("instep-mmap-")] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["family.py", "instep.toml", "logs"]


def test_sigterm_is_forwarded_and_ends_with_143(family: Path, tmp_path: Path) -> None:
    with Cli(["--nproc-per-node", "2", "--log-dir", "logs", str(family), "polite"], tmp_path) as cli:
        pids = started(cli, tmp_path / "logs")
        cli.process.terminate()
        code, out, _ = cli.end()
        assert code == 143
        assert "[rank 0] goodbye 15" in out
        assert "[rank 1] goodbye 15" in out
        until(lambda: not alive(pids), 1.0)


@pytest.mark.parametrize(("flags", "environ"), [([], {"INSTEP_DEADLINES__SHUTDOWN": "1.0"}), (["--shutdown-timeout", "1"], {})])
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(
    family: Path, tmp_path: Path, flags: list[str], environ: dict[str, str]
) -> None:
    with Cli([*flags, "--nproc-per-node", "2", "--log-dir", "logs", str(family), "deaf"], tmp_path, environ) as cli:
        pids = started(cli, tmp_path / "logs")
        begun = time.monotonic()
        cli.process.terminate()
        assert cli.end()[0] == 143
        assert 0.8 < time.monotonic() - begun < 5.0
        until(lambda: not alive(pids), 1.0)


def test_control_c_ends_with_130_and_a_second_one_at_once(family: Path, tmp_path: Path) -> None:
    with Cli(["--nproc-per-node", "2", "--log-dir", "logs", str(family)], tmp_path) as cli:
        started(cli, tmp_path / "logs")
        cli.process.send_signal(signal.SIGINT)
        code, out, _ = cli.end()
        assert code == 130
        assert out.count("KeyboardInterrupt") == 2, "each rank was interrupted, not killed"
    with Cli(["--nproc-per-node", "2", "--log-dir", "deaf", str(family), "deaf"], tmp_path) as cli:
        pids = started(cli, tmp_path / "deaf")
        begun = time.monotonic()
        cli.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        cli.process.send_signal(signal.SIGINT)
        assert cli.end()[0] == 130
        assert time.monotonic() - begun < 3.0
        until(lambda: not alive(pids), 1.0)


def test_an_agent_that_was_stopped_judges_nobody_for_its_own_absence(tmp_path: Path) -> None:
    with Cli(["--nproc-per-node", "2", "--log-dir", "logs", "--json", FAKE, "350"], tmp_path) as cli:
        started(cli, tmp_path / "logs", word="welcome")
        time.sleep(0.3)
        os.kill(cli.process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(cli.process.pid, signal.SIGCONT)
        code, out, err = cli.end()
        assert code == 0, err
        assert '"incidents": 0' in out.splitlines()[-1]


def test_a_printing_rank_is_not_blocked_by_a_stopped_agent(tmp_path: Path) -> None:
    script = tmp_path / "chatty.py"
    script.write_text(
        "import os, time\n"
        "print('up', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "for i in range(40000): print('x' * 100)\n"
        "open(f'done-{os.environ[\"RANK\"]}', 'w').close()\n"
    )
    with Cli(["--nproc-per-node", "2", str(script)], tmp_path) as cli:
        until(lambda: len([p for p in descendants(cli.process.pid) if "instep-rank" in Path(f"/proc/{p}/cmdline").read_text()]) == 2)
        os.kill(cli.process.pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(lambda: len(list(tmp_path.glob("done-*"))) == 2, 20.0, "both ranks to have printed 4 MB")
        os.kill(cli.process.pid, signal.SIGCONT)
        code, out, _ = cli.end()
        assert code == 0
        assert out.count("x" * 100) == 80000
