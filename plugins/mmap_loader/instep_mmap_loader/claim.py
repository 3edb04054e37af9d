"""Claims a directory for a reader: the one that holds its batches already, else the first that nobody reads."""

import os
from pathlib import Path

from instep_mmap_loader.desk import Desk
from instep_mmap_loader.errors import LoaderError, NoRoom
from instep_mmap_loader.folder import PRODUCER, Folder
from instep_mmap_loader.process import Identity
from instep_mmap_loader.recipe import Settings

_MOST = 64


def claim(run: Path, settings: Settings, reader: int) -> tuple[Folder, Desk]:
    """A directory of the stream in which this process is reader number ``reader`` from now on.

    Raises:
        LoaderError: a directory is not to be trusted, or a living process is that reader.
        NoRoom: there is no memory even for the reader's own page.
    """
    me = Identity.me()
    names = [f"{settings.name}.{number}" for number in range(1 if settings.readers > 1 else _MOST)]
    there = os.listdir(run) if run.is_dir() else []
    known = [name for name in names if name in there and _fingerprint(run / name) == settings.fingerprint]
    for name in [*known, *names]:
        folder = Folder.make(run / name)
        try:
            desk = Desk.take(folder, reader, me=me)
        except FileNotFoundError:
            folder.close()
            return claim(run, settings, reader)  # it was removed in that moment
        except NoRoom:
            folder.remove()
            folder.close()
            raise
        except BaseException:
            folder.close()
            raise
        if desk is not None:
            return folder, desk
        folder.close()
    raise LoaderError(
        f"reader {reader} of {run / names[0]} is in use by a living process: give each rank of the node its own reader=, and each of "
        "several loaders its own name=; two jobs of one script differ by run="
    )


def _fingerprint(path: Path) -> object:
    folder = Folder.find(path)
    if folder is None:
        return None
    try:
        return folder.noted(PRODUCER).get("fingerprint")
    finally:
        folder.close()
