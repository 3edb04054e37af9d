"""A drill's ledger: a digest of every collective result per committed step, and of all state when a block is left."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from torch import Tensor

from instep.torch.tape import raw


class Ledger:
    """Writes ``rank-R.steps.jsonl`` and ``rank-R.state.json``; a later line for a step replaces an earlier one."""

    def __init__(self, directory: str, rank: int) -> None:
        self._steps = Path(directory) / f"rank-{rank}.steps.jsonl"
        self._state = Path(directory) / f"rank-{rank}.state.json"
        self._seen: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()

    def observe(self, label: str, sequence: int, outputs: Sequence[Tensor]) -> None:
        """Digest one result as it arrives."""
        digest = xxhash.xxh3_64()
        for tensor in outputs:
            digest.update(raw(tensor))
        with self._lock:
            self._seen[label, sequence] = digest.hexdigest()

    def committed(self, step: int) -> None:
        """Close the page of a step."""
        with self._lock:
            rows, self._seen = self._seen, {}
        # Sequence numbers differ between births of a rank, their order does not.
        page = xxhash.xxh3_64("".join(f"{label}={rows[label, n]};" for label, n in sorted(rows)).encode()).hexdigest()
        with self._steps.open("a") as file:
            file.write(json.dumps({"step": step, "digest": page, "collectives": len(rows)}) + "\n")

    def drop(self) -> None:
        """Forget the page of a step that was cut."""
        with self._lock:
            self._seen = {}

    def state(self, digests: Mapping[str, str]) -> None:
        """Write the digests of all state."""
        self._state.write_text(json.dumps(digests, indent=1))
