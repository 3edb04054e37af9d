"""Which part of torch asks for a collective, read from the Python stack; needed in set-up and in drills only."""

import os
import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim import Optimizer

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ENGINE = "_engine_run_backward"
_PARAMETER_SYNC = frozenset({"_sync_params_and_buffers", "_sync_module_states"})
_MEGATRON = f"{os.sep}megatron{os.sep}core{os.sep}distributed{os.sep}"


def _outside() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HERE):
            yield frame
        frame = frame.f_back


def parameter_sync() -> bool:
    """Whether DDP is making parameters equal, torch's or Megatron's; they come from a donor later, so the result need not be kept."""
    return any(frame.f_code.co_name in _PARAMETER_SYNC or _megatron(frame) for frame in _outside())


def _megatron(frame: FrameType) -> bool:
    return frame.f_code.co_name == "broadcast_params" and _MEGATRON in frame.f_code.co_filename


def bucket_rebuild() -> bool:
    """Whether DDP's reducer is telling all ranks its new buckets, once in a run; after a recovery they are installed without it."""
    frame = next(_outside(), None)
    return frame is not None and frame.f_code.co_name == "_pre_forward"


def engine() -> bool:
    """Whether the caller's caller is the autograd engine itself: C++, such as DDP's reducer, and no function of the script's in it."""
    frame = sys._getframe(1).f_back
    return frame is not None and frame.f_code.co_name == _ENGINE


def optimizer() -> str | None:
    """The class of the innermost optimizer that is running."""
    for frame in _outside():
        owner = frame.f_locals.get("self")
        if isinstance(owner, Optimizer):
            return type(owner).__qualname__
    return None
