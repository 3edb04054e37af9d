"""Ranks that a signal stopped and that nobody replaces are spoken of, once each time."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from instep.agent.stopped import Stopped
from instep.agent.watchdog import Sight, Vitals

from .desk import NOTHING
from .jobs import FAKE, Cli

PIDS = {0: 100, 1: 101, 2: 102}


def sights(*stopped: int, births: dict[int, int] | None = None) -> list[Sight]:
    births = births or {}
    return [Sight(r, births.get(r, 0), NOTHING, Vitals(stopped=r in stopped), greeted=True, joined=True) for r in PIDS]


def said(watch: Stopped, ticks: int, *stopped: int, births: dict[int, int] | None = None) -> list[str]:
    return [line for _ in range(ticks) for line in watch.look(sights(*stopped, births=births), PIDS).splitlines()]


def test_all_ranks_are_spoken_of_soon_and_once_with_what_continues_them() -> None:
    watch = Stopped(tick=0.1, stall=5.0)
    assert said(watch, 9, 0, 1, 2) == []
    assert said(watch, 100, 0, 1, 2) == [
        "ranks 0, 1, 2 are stopped by a signal, and the job waits for them; to continue them: kill -CONT 100 101 102"
    ]
    assert said(watch, 100, 1) == ["ranks 0, 2 run again"]
    assert said(watch, 100) == ["rank 1 runs again"]


def test_one_rank_is_left_to_the_watchdog_first() -> None:
    watch = Stopped(tick=0.1, stall=5.0)
    assert said(watch, 59, 2) == []
    assert said(watch, 100, 2) == ["rank 2 is stopped by a signal, and the job waits for it; to continue it: kill -CONT 102"]


def test_a_stop_that_ends_in_time_counts_from_zero_the_next_time_and_a_replaced_rank_does_not_run_again() -> None:
    watch = Stopped(tick=0.1, stall=5.0)
    assert said(watch, 50, 2) + said(watch, 1) + said(watch, 50, 2) == []
    assert len(said(watch, 10, 2)) == 1
    assert said(watch, 50, births={2: 1}) == []


def test_a_job_whose_ranks_all_stop_says_so_and_goes_on_when_they_are_continued(tmp_path: Path) -> None:
    faults = [f"hang@{rank}@5" for rank in range(3)]
    told = ""
    with Cli(["--nproc-per-node", "3", FAKE, "60", *faults], tmp_path) as cli:
        assert cli.process.stderr is not None
        for line in cli.process.stderr:
            told += line
            if found := re.search(r"kill -CONT ([\d ]+)", line):
                for pid in found[1].split():
                    with suppress(ProcessLookupError):  # the watchdog may have replaced it meanwhile
                        os.kill(int(pid), signal.SIGCONT)
                break
        code, out, err = cli.end()
    assert "stopped by a signal, and the job waits for" in told
    assert code == 0, told + err
    assert out.count("end 60") == 3
