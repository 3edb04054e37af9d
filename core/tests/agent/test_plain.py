"""Scripts that know nothing of instep: exit codes, tracebacks, and a quick restart of the whole job."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.agent import events as ev
from instep.agent.agent import Server, serving

from .jobs import FAKE, alive, launch, play, until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(launch(FAKE)) as process:
        yield process


@pytest.fixture(params=[True, False], ids=["forked", "plain"])
def preload(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, ""),
        ("os.abort()", 134, "Fatal Python error: Aborted"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("atexit.register(print, 'at exit'); sys.exit(4)", 4, "at exit"),
        ("open('kept.txt', 'w').write('kept')", 0, ""),
        ("f = open('kept.txt', 'w'); f.write('kept')", 0, ""),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('thread done'))).start()", 0, "thread done"),
    ],
)
def test_exit_codes_and_last_words_are_pythons_own(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, words: str, *, preload: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"import atexit, os, signal, sys, threading, time\n{line}\n")
    story = play(launch(str(script), nproc=1, preload=preload, log_dir=str(tmp_path)), server)
    text = (tmp_path / "rank-0.log").read_text()
    assert story.outcome.code == code, text
    assert words in text
    if "kept" in line:
        assert (tmp_path / "kept.txt").read_text() == "kept"


def test_a_traceback_shows_the_script_and_nothing_of_instep(server: Server, tmp_path: Path, *, preload: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("def inner():\n    raise ValueError('what')\n\ninner()\n")
    play(launch(str(script), nproc=1, preload=preload, log_dir=str(tmp_path)), server)
    text = (tmp_path / "rank-0.log").read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert text.count("File ") == 2
    assert "instep" not in text.replace(str(tmp_path), "")
    assert text.count("ValueError: what") == 1


def test_a_kill_restarts_all_ranks_in_under_a_second(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, signal\n"
        "print(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['MASTER_PORT'], flush=True)\n"
        "time.sleep(0.3)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    job = launch(str(script), nproc=3, max_restarts=2, log_dir=str(tmp_path / "logs"))
    story = play(job, server)
    assert story.outcome.code == 0, story.outcome.message
    death = story.times(ev.Died)[0]
    births = [at for at in story.times(ev.Born) if at > death]
    assert len(births) == 3
    assert births[-1] - death < 1.0
    (incident,) = story.outcome.incidents
    assert (incident.scope, incident.fault.ranks) == ("job", (1,))
    lines = [(tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in range(3)]
    assert [[line.split()[1] for line in each] for each in lines] == [["0", "1"]] * 3
    ports = {line.split()[2] for each in lines for line in each}
    assert len(ports) == 2, "the same port on all ranks, a fresh one at each start"


def test_without_max_restarts_the_job_ends_as_the_script_did(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    outcome = play(launch(str(script), nproc=2), server).outcome
    assert outcome.code == 137
    assert "rank 1 was killed by signal 9 (SIGKILL)" in outcome.message
    assert outcome.incidents == []


def test_a_group_that_a_dead_rank_leaves_is_killed(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    script.write_text(script.read_text().replace("'child'", repr(str(tmp_path / "child"))))
    play(launch(str(script), nproc=1), server)
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive([child]), 1.0)
