"""A trainer to be killed: it appends the digest of each batch to a file, and keeps its position in another, as a session would."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from things import Counting, Plain, Samples, digest, producer

from instep_mmap_loader import MmapLoader

DATASETS = {"samples": Samples, "counting": Counting, "plain": Plain}


def main() -> None:
    out = Path(sys.argv[1])
    told = json.loads(sys.argv[2])
    loader = MmapLoader(DATASETS[told["dataset"]](), 4, directory=str(out), run="test", seed=5, timeout=30.0, **told["options"])
    state, done = out / "state", out / "digests"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    began = time.monotonic()
    for _ in range(loader.epoch, 2):
        for batch in loader:
            if began:
                (out / "first").write_text(str(time.monotonic() - began))
                began = 0
            with done.open("a") as file:
                file.write(digest(batch) + "\n")
            state.write_text(json.dumps(loader.state_dict()))
            if len(done.read_text().split()) in told["die"]:
                die(loader, told["with_producer"])
            time.sleep(told["pace"])
    loader.close()


def die(loader: MmapLoader, with_producer: bool) -> None:
    """As suddenly as it gets."""
    if with_producer:
        os.kill(producer(loader), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
