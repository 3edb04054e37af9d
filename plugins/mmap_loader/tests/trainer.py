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
    options = {"directory": str(out), "run": "test", "seed": 5, **told["options"]}
    loader = MmapLoader(DATASETS[told["dataset"]](), told["batch"], **options)
    state, done = out / f"state{told['who']}", out / f"digests{told['who']}"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    (out / "ready").write_text(str(loader.ready()))
    for _ in range(loader.epoch, 2):
        for batch in loader:
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
