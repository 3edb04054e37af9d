"""A thread that moves much asks the scheduler not to interrupt others for it.

Donors that wake up when their socket takes bytes again would each time interrupt whoever computes on that processor, often the one who
receives. ``SCHED_BATCH`` (Linux; no privilege is needed) lets them go on, and costs nothing where processors are free.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def batch() -> Generator[None, None, None]:
    """Run the calling thread as a batch; one that has a policy of its own choice keeps it."""
    usual = os.sched_getscheduler(0) == os.SCHED_OTHER
    if usual:
        _policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if usual:
            _policy(os.SCHED_OTHER)


def _policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid the call
        os.sched_setscheduler(0, policy, os.sched_param(0))
