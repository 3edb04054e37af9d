"""What the ranks of a test job end with: each tells digests of all that it holds, which owe nothing to the code under test."""

import hashlib
import json
import sys
from collections.abc import Sequence

from instep.messages import Injection
from instep.testing.jobs import JobRun

_MARK = "FINAL "


def digest(tree: object) -> str:
    """A short digest of everything below ``tree``: bytes of tensors (of DTensors the part of this rank), text of all else, in order."""
    import torch
    from torch.distributed.tensor import DTensor

    state = hashlib.sha256()

    def feed(node: object) -> None:
        if isinstance(node, torch.Tensor):
            part = (node.to_local() if isinstance(node, DTensor) else node).detach().contiguous().view(-1)
            state.update(f"{node.dtype}{tuple(node.shape)}{len(part)}".encode())
            state.update(part.view(torch.uint8).numpy().tobytes() if len(part) else b"")
        elif isinstance(node, dict):
            for key, value in node.items():
                state.update(repr(key).encode())
                feed(value)
        elif isinstance(node, list | tuple):
            for value in node:
                feed(value)
        else:
            state.update(repr(node).encode())

    feed(tree)
    return state.hexdigest()[:16]


def tell(values: dict[str, object]) -> None:
    """In a rank: write what it ends with into its log."""
    sys.stdout.write(f"{_MARK}{json.dumps(values)}\n")
    sys.stdout.flush()


def finals(run: JobRun, ranks: int) -> list[dict[str, object]]:
    """In the test: what each rank told at its end. Raises ``AssertionError`` with the log of a rank that told nothing."""
    out: list[dict[str, object]] = []
    for rank in range(ranks):
        lines = [line for line in run.log(rank).splitlines() if line.startswith(_MARK)]
        assert lines, f"rank {rank} told no end:\n{run.log(rank)[-3000:]}"
        out.append(json.loads(lines[-1].removeprefix(_MARK)))
    return out


def differing(ours: list[dict[str, object]], theirs: list[dict[str, object]]) -> list[str]:
    """Which rank ended with another value of what."""
    return [f"rank {r} {key}" for r, mine in enumerate(ours) for key in mine if mine[key] != theirs[r].get(key)]


def same(
    clean: JobRun, other: JobRun, placed: Sequence[Injection], *, name: str, ranks: int, lost: Sequence[int] = (), steps_lost: int = 0
) -> None:
    """In the test: ``other`` ended well and as ``clean`` did, recovered in process from each fault but those with an id in ``lost``.

    ``steps_lost`` is what an incident may cost. Raises ``AssertionError`` that tells what differs.
    """
    story = f"{name}: " + ", ".join(f"{i.kind} {i.rank}@{i.step} {i.point}" for i in placed)
    assert other.outcome.code == 0, f"{story}: {other.outcome.message}\n{other.log(placed[0].rank)[-3000:]}"
    differs = differing(finals(clean, ranks), finals(other, ranks))
    assert not differs, f"{story}: {differs}"
    told = f"{story}: {other.incidents}"
    assert all(i.scope == "in_process" and i.steps_lost <= steps_lost and i.verified for i in other.incidents), told
    assert {i.id for i in other.missing} <= set(lost), f"{story}: never happened: {[i.id for i in other.missing]}"
