"""The keys under which ``ProcessGroupNCCL`` asks its store for ids, and who knows the answer. Imports no torch.

``UniqueNCCLID:r`` is root r of a communicator with several roots, a bare number counts the communicators with one root, and ``low:high`` is
the communicator of a pair. Anything after the number of a root is a counter of communicators in a torch that keeps one.
"""

import re
from dataclasses import dataclass

_ROOT = re.compile(r"UniqueNCCLID:(?:(\d+):)?(\d+)")
_SINGLE = re.compile(r"\d+")
_PAIR = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Root:
    """One of several roots of a communicator of the whole group."""

    index: int


@dataclass(frozen=True)
class Known:
    """An id that the rank ``owner`` of the group has made, and that no other can compute."""

    owner: int


def parse(key: str) -> Root | Known | None:
    """What a key asks for, whatever prefixes were put before it; ``None`` for one that is not about an id."""
    last = key.rpartition("/")[2]
    if root := _ROOT.fullmatch(last):
        return Root(int(root[2]))
    if pair := _PAIR.fullmatch(last):
        return Known(int(pair[1]))
    return Known(0) if _SINGLE.fullmatch(last) else None
