"""Starts the producer: a fresh interpreter in a session of its own, no child of the trainer, so that it outlives it.

It sees the trainer's environment, as the workers of ``DataLoader`` do: data sets read their rank and thread counts there.
"""

import os
import stat
import subprocess
import sys

from instep.agent.channel import inherited
from instep_mmap_loader.recipe import Payload, Settings

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; from instep_mmap_loader.boot import main; main(sys.argv[1:])"


def launch(settings: Settings, payload: Payload, lock: int) -> "subprocess.Popen[bytes]":
    """Start it; it inherits the lock and the recipe. The process returned ends at once, its child is the producer."""
    memory = os.memfd_create("instep-recipe", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            payload.write(file)
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, settings.json(), str(memory), str(lock)],
            pass_fds=[memory, lock],
            stdin=subprocess.DEVNULL,
            stdout=_lasting(1),
            stderr=_lasting(2),
            env=inherited(),
            start_new_session=True,
        )
    finally:
        os.close(memory)


def _lasting(fd: int) -> int | None:
    """Inherit a file or terminal; the other end of a pipe would wait for the producer's end, long after the trainer's."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
