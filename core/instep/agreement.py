"""Comparing shard groups over the world: every rank tells a word about each of its groups, and every rank knows who differs.

``gather`` is a world all-gather of byte strings of equal length; all ranks must call these functions together.
"""

import struct
from collections.abc import Callable, Mapping, Sequence

import xxhash

from instep.errors import UsageError

Gather = Callable[[bytes], Sequence[bytes]]
_COUNT = struct.Struct("<I")
_KEY = struct.Struct("<Q")
_NAME = 200
"""Bytes of a name that are told to other ranks."""


def key(name: str) -> int:
    """The 64-bit number by which a shard group is known on all ranks."""
    return int(xxhash.xxh3_64_intdigest(name.encode()))


def table(gather: Gather, words: Mapping[int, bytes], *, size: int) -> dict[int, dict[int, bytes]]:
    """For each key that any rank has: the ranks that have it, with their words of ``size`` bytes. ``words``: this rank's own, by key.

    One ``gather``, or two if some rank has several keys.
    """
    own, row = [_KEY.pack(k) + word for k, word in words.items()], _KEY.size + size
    first = gather(_COUNT.pack(len(own)) + b"".join(own[:1]).ljust(row, b"\0"))
    counts = [int(_COUNT.unpack_from(data)[0]) for data in first]
    said = [bytes(data[_COUNT.size :]) for data in first]
    if (most := max(counts)) > 1:
        more = gather(b"".join(own[1:]).ljust((most - 1) * row, b"\0"))
        said = [one + bytes(rest) for one, rest in zip(said, more, strict=True)]
    out: dict[int, dict[int, bytes]] = {}
    for rank, (count, data) in enumerate(zip(counts, said, strict=True)):
        for at in range(0, count * row, row):
            out.setdefault(_KEY.unpack_from(data, at)[0], {})[rank] = data[at + _KEY.size : at + row]
    return out


def differing(rows: Mapping[int, Mapping[int, bytes]]) -> dict[int, tuple[int, ...]]:
    """Keys whose ranks do not agree, with these ranks."""
    return {k: tuple(sorted(d)) for k, d in sorted(rows.items()) if len(set(d.values())) > 1}


def explain(gather: Gather, ranks: Sequence[int], parts: Mapping[str, str] | None, rank: int) -> None:
    """Name the first part in which ``ranks`` differ; ``parts`` (name → digest in hex) is ``None`` on ranks without this group.

    Raises:
        UsageError: always, on every rank, with the same text but for the names that other ranks cannot know in full.
    """
    own = parts or {}
    counts = [_COUNT.unpack(row)[0] for row in gather(_COUNT.pack(len(own)))]
    if len({counts[r] for r in ranks}) > 1:
        raise UsageError(
            f"shared state differs in structure between ranks {list(ranks)} before the first block: protect the same objects on each"
        )
    items = list(own.items())
    for i in range(max(counts[r] for r in ranks)):
        name, digest = items[i] if i < len(items) else ("", "")
        rows = gather(name.encode()[:_NAME].ljust(_NAME, b"\0") + digest.encode().ljust(32, b"\0"))
        odd = {r: rows[r][_NAME:].rstrip(b"\0").decode() for r in ranks}
        if len(set(odd.values())) > 1:
            shown = name if rank in ranks else rows[ranks[0]][:_NAME].rstrip(b"\0").decode(errors="replace")
            raise UsageError(
                f"shared state {shown!r} differs between ranks before the first block: {odd}. Seed all ranks alike, broadcast it, "
                "or wrap the model in DDP (which broadcasts) before session.protect"
            )
    raise UsageError(
        f"shared state differs in structure between ranks {list(ranks)} before the first block: protect the same objects on each"
    )
