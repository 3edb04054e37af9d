"""The sharded job, with a copy that comes late, or whose memory is altered: ``--slow R@S`` and ``--altered R@S`` before its arguments.

``slow``: what rank R sends of step S waits until R is dead or something has gone wrong. ``altered``: the copy that rank R keeps for another
one of step S changes by one bit once it is complete.
"""

import runpy
import sys
import time
from pathlib import Path

from instep_state_replica.buddy_receive import Receiver
from instep_state_replica.buddy_send import Sender, Task
from instep_state_replica.copies import Copy, Shelf

SHARDED = Path(__file__).parents[1] / "sharded" / "sharded_job.py"
_LONG = 30.0


def slow(rank: int, step: int) -> None:
    """Hold back what a rank sends of a step."""
    send = Sender._send

    def late(self: Sender, task: Task, copy: Copy) -> None:
        end = time.monotonic() + _LONG
        while (self._rank, task.step, task.book.incarnation) == (rank, step, 0) and time.monotonic() < end:
            self._go_on(task)
            time.sleep(0.01)
        send(self, task, copy)

    Sender._send = late  # type: ignore[method-assign]


def altered(rank: int, step: int) -> None:
    """Flip a bit of a copy that a rank keeps for another one."""
    init = Receiver.__init__

    class Bad(Shelf):
        def put(self, copy: Copy) -> None:
            if copy.step == step:
                copy.parts[0].bytes[3] ^= 1
            super().put(copy)

    def bad(self: Receiver, *, rank: int, secret: bytes, host: str) -> None:
        init(self, rank=rank, secret=secret, host=host)
        if rank == altered_rank:
            self._shelf = Bad()

    altered_rank = rank
    Receiver.__init__ = bad  # type: ignore[method-assign]


def main() -> None:
    while len(sys.argv) > 1 and sys.argv[1] in ("--slow", "--altered"):
        rank, step = sys.argv[2].split("@")
        (slow if sys.argv[1] == "--slow" else altered)(int(rank), int(step))
        del sys.argv[1:3]
    runpy.run_path(str(SHARDED), run_name="__main__")


if __name__ == "__main__":
    main()
