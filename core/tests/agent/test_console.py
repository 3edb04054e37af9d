"""What a person sees: prefixed lines, progress, and what becomes of partial output."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.agent.console import Console, Status
from instep.agent.logs import Logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    kept = Logs(str(tmp_path), 2)
    yield kept
    kept.close()


def test_lines_get_their_rank_and_wait_until_they_are_complete(logs: Logs) -> None:
    out = io.StringIO()
    console = Console(logs, 2, out=out, err=None)
    os.write(logs.fd(0), b"one\ntw")
    os.write(logs.fd(1), b"uno\n")
    console.poll(0.0, None)
    assert out.getvalue() == "[rank 0] one\n[rank 1] uno\n"
    os.write(logs.fd(0), b"o\n")
    console.poll(0.0, None)
    assert out.getvalue().endswith("[rank 0] two\n")


def test_the_end_shows_what_has_no_line_end_and_a_split_character_survives(logs: Logs) -> None:
    out = io.StringIO()
    console = Console(logs, 2, out=out, err=None)
    os.write(logs.fd(0), "grün".encode()[:3])
    console.poll(0.0, None)
    os.write(logs.fd(0), "grün".encode()[3:])
    console.end()
    assert out.getvalue() == "[rank 0] grün\n"


def test_a_progress_bar_shows_its_last_state(logs: Logs) -> None:
    out = io.StringIO()
    console = Console(logs, 2, out=out, err=None)
    os.write(logs.fd(0), b"10%\r50%\r100%\n")
    console.poll(0.0, None)
    assert out.getvalue() == "[rank 0] 100%\n"


def test_progress_is_a_line_now_and_then_without_a_terminal(logs: Logs) -> None:
    err = io.StringIO()
    console = Console(logs, 2, out=None, err=err)
    for second in range(21):
        console.poll(100.0 + second, Status(step=second * 5, incidents=second // 10))
    assert err.getvalue().splitlines() == ["instep: step 50, 5.0 steps/s, 1 incident", "instep: step 100, 5.0 steps/s, 2 incidents"]


def test_progress_is_one_live_line_on_a_terminal_that_never_mixes_with_output(logs: Logs) -> None:
    screen = Terminal()
    console = Console(logs, 2, out=screen, err=screen)
    console.poll(100.0, Status(step=0, incidents=0))
    console.poll(101.0, Status(step=8, incidents=0))
    os.write(logs.fd(0), b"hello\n")
    console.poll(101.01, Status(step=8, incidents=0))
    console.end()
    shown = screen.getvalue()
    assert "\r\x1b[Kstep 8, 8.0 steps/s, no incidents\r\x1b[K[rank 0] hello\nstep 8" in shown
    assert shown.endswith("\r\x1b[K")


def test_logs_append_over_births_and_jobs_and_show_only_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("an earlier job\n")
    logs = Logs(str(tmp_path), 1)
    os.write(logs.fd(0), b"this job\n")
    assert logs.read(0) == b"this job\n"
    assert (tmp_path / "rank-0.log").read_text() == "an earlier job\nthis job\n"
    logs.close()


def test_nameless_logs_leave_no_file_and_give_shown_blocks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = Logs(None, 1)
    assert list(tmp_path.iterdir()) == []
    for _ in range(80):
        os.write(logs.fd(0), b"x" * (1 << 18))
        while logs.read(0):
            pass
    assert os.fstat(logs.fd(0)).st_blocks * 512 < 12 << 20
    logs.close()


def test_a_stream_that_cannot_be_written_is_given_up_and_said(logs: Logs) -> None:
    err = io.StringIO()
    with open("/dev/full", "w") as full:
        console = Console(logs, 2, out=full, err=err)
        os.write(logs.fd(0), b"one\n")
        console.poll(0.0, None)
        os.write(logs.fd(1), b"two\n")
        console.end()
    assert err.getvalue().splitlines() == [
        "instep: the ranks' output cannot be written any more (No space left on device); their logs keep it; the job goes on"
    ]


def test_a_lost_terminal_is_silence(logs: Logs) -> None:
    with open("/dev/full", "w") as full:
        console = Console(logs, 2, out=full, err=full)
        console.say("hello")
        os.write(logs.fd(0), b"one\n")
        console.poll(0.0, Status(step=1, incidents=0))
        console.end()


def test_hidden_ranks_are_read_and_not_shown(logs: Logs) -> None:
    out = io.StringIO()
    console = Console(logs, 2, out=out, err=None, hidden={1})
    os.write(logs.fd(0), b"one\n")
    os.write(logs.fd(1), b"two\nrest")
    console.end()
    assert out.getvalue() == "[rank 0] one\n"
    assert logs.read(1) == b""


def test_what_a_terminal_cannot_show_is_spelt_out(logs: Logs, tmp_path: Path) -> None:
    with open(tmp_path / "shown", "w", encoding="ascii") as shown:
        console = Console(logs, 2, out=shown, err=None)
        os.write(logs.fd(0), "grün\n".encode())
        console.end()
    assert (tmp_path / "shown").read_bytes() == b"[rank 0] gr\\xfcn\n"
