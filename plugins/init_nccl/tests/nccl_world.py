"""Ranks that use the plugin on a real GPU: processes of ``nccl_rank.py``, and what an agent would do for them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep_init_nccl.plugin import InitNccl

Wire = Any
Each = Callable[[int], Mapping[str, Wire]]


class World:
    """``size`` ranks on the GPUs of this machine, one group of all of them."""

    def __init__(self, size: int, *, variables: Mapping[str, str] | None = None, **settings: Wire) -> None:
        self.size, self.incarnation = size, -1
        self.groups = [{"name": "world", "ranks": list(range(size)), "backend": "nccl"}]
        environment = {**os.environ, **InitNccl().environment(), "NCCL_SOCKET_IFNAME": "lo", **(variables or {})}
        words = [sys.executable, str(Path(__file__).with_name("nccl_rank.py"))]
        self._ranks = [
            subprocess.Popen(
                [*words, str(rank), json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
            )
            for rank in range(size)
        ]

    def ask(self, op: str, ranks: Sequence[int] | None = None, each: Each = lambda _: {}, **more: Wire) -> list[Wire]:
        """One command on several ranks at once; nothing may go wrong."""
        chosen = range(self.size) if ranks is None else ranks
        for rank in chosen:
            stdin = self._ranks[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps({"op": op, **more, **each(rank)}) + "\n")
            stdin.flush()
        replies = []
        for rank in chosen:
            stdout = self._ranks[rank].stdout
            assert stdout is not None
            replies.append(json.loads(stdout.readline()))
        assert all("value" in reply for reply in replies), replies
        return [reply["value"] for reply in replies]

    def connect(self) -> None:
        """Quiesce, and connect the next incarnation."""
        self.incarnation += 1
        self.ask("quiesce", incarnation=self.incarnation)
        notes = self.ask("announce", groups=self.groups)
        addresses = [{"rank": rank, "birth": 0, "host": "127.0.0.1"} for rank in range(self.size)]
        self.ask("connect", groups=self.groups, book={"incarnation": self.incarnation, "addresses": addresses, "notes": notes})

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
