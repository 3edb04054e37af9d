"""Writes down what a script can see of the interpreter that runs it: ``facts.py DIR ...``, one JSON file a rank.

With ``SPARE`` in the environment, rank 0 fails in its first life, once a spare process is ready to replace a rank.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch


class Thing:
    pass


def pair(queue: "multiprocessing.Queue[int]") -> None:
    queue.put(os.getppid())


def facts() -> dict[str, object]:
    queue: multiprocessing.Queue[int] = multiprocessing.Queue()
    child = multiprocessing.Process(target=pair, args=(queue,))
    child.start()
    parent = queue.get(timeout=20)
    child.join()
    return {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "spec": str(__spec__),
        "main is this module": sys.modules["__main__"].__dict__ is globals(),
        "class module": Thing.__module__,
        "first on path": sys.path[0],
        "rest of path": [p for p in sys.path[1:] if p],
        "cwd": os.getcwd(),
        "environment": {k: v for k, v in os.environ.items() if k not in {"MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
        "environment of C": os.popen("echo $RANK $LOCAL_RANK $WORLD_SIZE").read(),
        "start method": multiprocessing.get_start_method(),
        "child's parent": parent == os.getpid(),
        "process name": multiprocessing.current_process().name,
        "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals if s not in {signal.SIGKILL, signal.SIGSTOP}},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": os.umask(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "main thread": threading.current_thread() is threading.main_thread(),
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "torch default dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "streams": [(s.fileno(), s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "same streams": sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__,
        "event loop": asyncio.run(asyncio.sleep(0, "runs")),
        "flags": str(sys.flags),
        "executable": sys.executable,
        "open files": len(os.listdir("/proc/self/fd")),
        "group leader": os.getpgrp() == os.getpid(),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "comm": Path("/proc/self/comm").read_text().strip(),
        "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "stdin": sys.stdin.read(),
        "draws": [random.random(), float(np.random.rand()), float(torch.rand(1))],  # noqa: NPY002 - scripts draw from it
        "seed": torch.initial_seed(),
        "os threads": len(os.listdir("/proc/self/task")),
        "pid": os.getpid(),
    }


def fail_once_a_spare_is_ready() -> None:
    """Ready: asleep several times in a row, so the rehearsal is over."""
    until, asleep = time.monotonic() + 20.0, 0
    while time.monotonic() < until and asleep < 4:
        time.sleep(0.05)
        spares = {path.name: state for path in Path("/proc").glob("[0-9]*") if (state := spare(path))}
        asleep = asleep + 1 if list(spares.values()) == ["S"] else 0
    Path(sys.argv[1], "spare").write_text(" ".join(spares))
    sys.exit(3)


def spare(process: Path) -> str:
    """The state of a process, if it is a spare of this fork server."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        return state if int(parent) == os.getppid() and (process / "comm").read_text() == "instep-spare\n" else ""
    except OSError:
        return ""


if __name__ == "__main__":
    if "SPARE" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            fail_once_a_spare_is_ready()
        time.sleep(30.0)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(facts()))
