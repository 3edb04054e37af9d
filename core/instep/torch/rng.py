"""Every random generator that a process has without being told: python, numpy, torch, and the CUDA device in use."""

import random
import struct
import sys

import torch

_LENGTH = struct.Struct("<I")
_PYTHON = struct.Struct("<625I?d")
_NUMPY_TAIL = struct.Struct("<iid")


def capture(*, but_numpy: bool = False) -> bytes:
    """All generator states, as bytes: equal bytes mean equal draws to come. Numpy's takes longer than the others together."""
    parts = (_python(), torch.get_rng_state().numpy().tobytes(), _cuda(), b"" if but_numpy else _numpy())
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def restore(state: bytes) -> None:
    """Set all generators to a captured state."""
    parts, at = [], 0
    while at < len(state):
        (length,) = _LENGTH.unpack_from(state, at)
        parts.append(state[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    python, cpu, cuda, numpy_ = parts
    *words, has_gauss, gauss = _PYTHON.unpack(python)
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    if numpy_:
        _set_numpy(numpy_)
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    if cuda:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(cuda), dtype=torch.uint8))


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch from one number."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _python() -> bytes:
    _version, words, gauss = random.getstate()
    return _PYTHON.pack(*words, gauss is not None, gauss or 0.0)


def _numpy() -> bytes:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return b""
    _name, keys, position, has_gauss, gauss = numpy.random.get_state()
    return bytes(keys.tobytes() + _NUMPY_TAIL.pack(position, has_gauss, gauss))


def _set_numpy(state: bytes) -> None:
    import numpy

    position, has_gauss, gauss = _NUMPY_TAIL.unpack_from(state, len(state) - _NUMPY_TAIL.size)
    keys = numpy.frombuffer(state[: -_NUMPY_TAIL.size], dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", keys, position, has_gauss, gauss))  # noqa: NPY002 - the generator that scripts draw from


def _cuda() -> bytes:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return b""
    return torch.cuda.get_rng_state().numpy().tobytes()
