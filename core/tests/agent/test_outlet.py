"""The agent never waits for whoever reads its console."""

import json
import os
import signal
from pathlib import Path

import pytest

from instep.agent.outlet import Outlet

from .jobs import FAKE, Cli, descendants, until

SIZE = 1_000_000
"""More than a pipe holds."""


def test_a_pipe_that_nobody_reads_holds_up_nothing_and_loses_nothing() -> None:
    read, write = os.pipe()
    outlet = Outlet()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as stream:
        outlet.write(stream, "x" * SIZE)
        outlet.write(stream, "end")
        assert outlet.backlog == SIZE + 3
        assert reader.read(SIZE + 3) == "x" * SIZE + "end"
        outlet.settle()
        assert outlet.backlog == 0
        assert outlet.failed() is None
        outlet.close()


def test_a_reader_that_goes_ends_the_wait_and_the_other_stream_is_written() -> None:
    (read, write), (other, into) = os.pipe(), os.pipe()
    outlet = Outlet()
    with os.fdopen(write, "w") as broken, os.fdopen(into, "w") as whole, os.fdopen(other) as reader:
        outlet.write(broken, "x" * SIZE)
        os.close(read)
        outlet.write(broken, "more")
        outlet.write(whole, "hello")
        outlet.close()
        assert reader.read(5) == "hello"
        failed = outlet.failed()
        assert failed is not None
        assert failed[0] is broken
        assert isinstance(failed[1], BrokenPipeError)
        assert outlet.failed() is None


def test_a_stream_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    outlet = Outlet()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as stream:
        outlet.write(stream, "x" * SIZE)
        assert reader.read(SIZE) == "x" * SIZE
        outlet.close()
        assert outlet.failed() is None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_the_wait_for_a_reader_that_never_comes(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    (tmp_path / "chatty.py").write_text(f"print('x' * {SIZE})\nopen('done', 'w').close()\n")
    with Cli(["chatty.py"], tmp_path) as cli:
        until((tmp_path / "done").exists, what="the script's end")
        until(lambda: not descendants(cli.process.pid) and _waits(cli.process.pid), what="the job to be over, and the agent to wait")
        cli.process.send_signal(signum)
        assert cli.process.wait(10) == code
        assert cli.process.stderr is not None
        assert "Traceback" not in cli.process.stderr.read()


def _waits(pid: int) -> bool:
    """Whether a process is done with its event loop: SIGTERM does what it does by default."""
    caught = next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return not int(caught, 16) & 1 << signal.SIGTERM - 1


def test_a_recovery_does_not_wait_for_the_reader_of_the_console(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        f"import runpy\nprint(('x' * 99 + '\\n') * {SIZE // 100})\nrunpy.run_path({FAKE!r}, run_name='__main__')\n"
    )
    report = tmp_path / "reports" / "incidents.jsonl"
    with Cli(["--nproc-per-node", "3", "--report-dir", "reports", "chatty.py", "60", "kill@1@5"], tmp_path) as cli:
        until(lambda: report.exists() and report.read_text().endswith("}\n"), what="the incident to be over while nobody reads")
        assert json.loads(report.read_text())["scope"] == "in_process"
        code, out, err = cli.end()
    assert code == 0, err
    assert out.count("x" * 99 + "\n") == 4 * SIZE // 100, "three ranks and a replacement have printed"
    assert "incident 1, exit of rank 1" in err
