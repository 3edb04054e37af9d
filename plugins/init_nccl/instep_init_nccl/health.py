"""What must be right before NCCL is used on this rank, and the same on all: each error names the rank and what to do."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from instep.errors import CommsError, ConfigError
from instep.model import AddressBook, Group, Json

OLDEST = (2, 18)
"""The first NCCL whose communicators can be aborted while they are made, as ``ncclCommInitRankConfig`` makes them."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def device_of(rank: int, local_rank: int, *, share: bool) -> torch.device:
    """The CUDA device of a rank. Raises ``ConfigError`` when this torch, or this machine, has none for it."""
    if not dist.is_nccl_available():
        raise ConfigError(
            f"rank {rank}: backend nccl was asked for, and torch {torch.__version__} is built without it: install a CUDA build of torch, "
            "or leave the configuration's backend at gloo"
        )
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            f"rank {rank}: backend nccl was asked for, and torch {torch.__version__} sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if local_rank >= count and not share:
        raise ConfigError(
            f"rank {rank}: local rank {local_rank} has no GPU of its own, this machine shows {count}: start fewer ranks, or "
            "set plugins.init_nccl.share_gpus for a test (NCCL 2.30 and later)"
        )
    return torch.device("cuda", local_rank % count)


def version_of(rank: int, version: Sequence[int]) -> str:
    """NCCL's version as text. Raises ``ConfigError`` for one that is too old."""
    text = ".".join(str(part) for part in version)
    if tuple(version[:2]) < OLDEST:
        needed = ".".join(str(part) for part in OLDEST)
        raise ConfigError(f"rank {rank}: NCCL {text} is too old, {needed} is needed: install a newer nvidia-nccl, or a newer torch")
    return text


def port_of(rank: int, local_rank: int, base: int | None, ephemeral: str | None = None) -> int:
    """The port of a rank's mini root; 0 lets the kernel choose. Raises ``ConfigError`` for one that the kernel may give to anybody."""
    if base is None:
        return 0
    low, high = map(int, (ephemeral or EPHEMERAL.read_text(encoding="ascii")).split())
    port = base + local_rank
    if low <= port <= high:
        raise ConfigError(
            f"rank {rank}: plugins.init_nccl.port = {base} gives it port {port}, inside the range {low}-{high} from which the kernel takes "
            "ports for any connection (net.ipv4.ip_local_port_range): choose one outside of it"
        )
    return port


def roots(group: Group, book: AddressBook, plugin: str) -> tuple[tuple[str, int], ...]:
    """Where the mini roots of a group's members listen, in group order.

    Raises:
        CommsError: a member announced nothing.
        ConfigError: members have different NCCL.
    """
    notes = {rank: _note(book, rank, plugin) for rank in group.ranks}
    if silent := [rank for rank, note in notes.items() if not note]:
        raise CommsError(
            f"NCCL group {group.name!r} in incarnation {book.incarnation}: rank {', '.join(map(str, silent))} announced nothing for it; "
            "enable init_nccl on all ranks"
        )
    versions: dict[str, list[int]] = {}
    for rank, note in notes.items():
        versions.setdefault(str(note.get("nccl")), []).append(rank)
    if len(versions) > 1:
        told = "; ".join(f"{version} on rank {', '.join(map(str, ranks))}" for version, ranks in sorted(versions.items()))
        raise ConfigError(
            f"NCCL group {group.name!r} in incarnation {book.incarnation} has ranks with different NCCL: {told}. Install one everywhere"
        )
    return tuple((str(note["host"]), int(str(note["port"]))) for note in notes.values())


def _note(book: AddressBook, rank: int, plugin: str) -> Mapping[str, Json]:
    note = book.notes[rank].get(plugin) if rank < len(book.notes) else None
    return note if isinstance(note, dict) else {}
