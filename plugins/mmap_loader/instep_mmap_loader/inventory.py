"""What a producer finds in its directory: records of an earlier one, and the states at which a stateful source may go on."""

import contextlib
from collections.abc import Iterator

from instep_mmap_loader.errors import Refused
from instep_mmap_loader.files import Mapped, Pool, record_at
from instep_mmap_loader.folder import Folder
from instep_mmap_loader.order import At
from instep_mmap_loader.record import Content, peek, read


def take_over(folder: Folder, pool: Pool, *, fingerprint: str) -> None:
    """Keep the records that belong to this stream, and make all other record files free ones."""
    mapped = Mapped(folder, writable=False)
    sizes = []
    for name in folder.names():
        at = record_at(name)
        if not folder.regular(name):
            continue
        if at is not None:
            with contextlib.suppress(Refused, FileNotFoundError):
                view = mapped.view(name)
                label = peek(view)
                if label.fingerprint == fingerprint and label.at == at and label.kind in ("batch", "end"):
                    pool.published[at] = label.next
                    sizes.append(len(view))
                    continue
            pool.published[at] = at
            pool.retire(at)
        elif name.startswith("free-"):
            pool.free.append(name)
    pool.adopt(max(sizes, default=0))


def state_at(folder: Folder, pool: Pool, at: At, *, fingerprint: str) -> bytes | None:
    """The source's state at a place: from the record before it, or from a reader that seeks there."""
    mapped = Mapped(folder, writable=False)
    before = [f"r-{place.epoch}-{place.sample}" for place, following in pool.published.items() if following == at != place]
    for name in [*before, *(name for name in folder.names() if name.startswith("seek-"))]:
        for content in _read(mapped, name, fingerprint):
            if content.label.next == at and content.state is not None:
                return content.state
    return None


def _read(mapped: Mapped, name: str, fingerprint: str) -> Iterator[Content]:
    with contextlib.suppress(Refused, FileNotFoundError, OSError):
        yield read(mapped.view(name), fingerprint=fingerprint)
