"""The producer's first steps: it leaves the trainer's family before it imports anything large, and says who it is."""

import json
import mmap
import os
import signal
import traceback
from pathlib import Path

from instep_mmap_loader.folder import PRODUCER, Folder
from instep_mmap_loader.process import Identity
from instep_mmap_loader.watch import Watch


def main(argv: list[str]) -> None:
    """Become the producer. ``argv``: settings, and the descriptors of recipe and lock."""
    if os.fork():
        os._exit(0)
    told, memory, lock = json.loads(argv[0]), int(argv[1]), int(argv[2])
    folder = Folder.find(Path(told["folder"]))
    if folder is None:
        return  # the reader is gone already
    before = folder.noted(PRODUCER)
    known = before.get("generation")
    generation = known if isinstance(known, int) else 0
    generation += int(before.get("fingerprint") not in (None, told["fingerprint"]))
    note = {**Identity.me().plain(), "fingerprint": told["fingerprint"], "generation": generation}
    folder.note(PRODUCER, note)
    watch = Watch(folder, Identity.parse(told["agent"]), lock)
    try:
        watch.start()
        _produce(argv[0], memory, folder, watch, generation)
        with folder.exclusive():
            if not any(folder.readers()):
                folder.remove()
    except BaseException:  # noqa: BLE001 - whatever it is, the trainer must learn of it and go on without the cache
        folder.note(PRODUCER, {**note, "failed": traceback.format_exc()[-3000:]})
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _produce(text: str, memory: int, folder: Folder, watch: Watch, generation: int) -> None:
    import torch

    from instep_mmap_loader.producer import Producer
    from instep_mmap_loader.recipe import Settings, load

    torch.set_num_threads(1)
    settings = Settings.parse(text)
    payload = mmap.mmap(memory, 0, flags=mmap.MAP_PRIVATE)  # lives as long as the tensors in it
    os.close(memory)
    source, init = load(memoryview(payload), settings.main)
    producer = Producer(settings, folder, watch, generation)
    producer.start(source, init)
    producer.run()
