"""Buffers that the first commit body changes are shared, so they must be equal on all ranks; an error names them otherwise."""

from collections.abc import Sequence

import pytest
import torch

from instep.errors import UsageError
from instep.torch.state import RankState


def state(value: float) -> RankState:
    """A rank that found one buffer to be shared."""
    import os

    out = RankState(os.memfd_create("test", os.MFD_CLOEXEC))
    out.shared.adopt_buffer("ema.mean", torch.full((3,), value))
    return out


def gather(*values: float) -> Sequence[bytes]:
    """What all ranks would gather."""
    sent: list[bytes] = []

    def alone(data: bytes) -> Sequence[bytes]:
        sent.append(data)
        return [data]

    for value in values:
        state(value).agree_on_moved(alone)
    return sent


def test_equal_buffers_pass() -> None:
    rows = gather(1.0, 1.0, 1.0)
    state(1.0).agree_on_moved(lambda _: rows)


def test_buffers_that_differ_are_named() -> None:
    rows = gather(1.0, 2.0, 1.0)
    with pytest.raises(UsageError, match=r"ema\.mean.*nn\.ParameterList"):
        state(1.0).agree_on_moved(lambda _: rows)
