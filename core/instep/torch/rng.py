"""Every random generator that a process has without being told: python, numpy, torch, and the CUDA device in use."""

import ctypes
import random
import struct
import sys

import torch

_LENGTH = struct.Struct("<I")
_PYTHON = struct.Struct("<625I?d")
_NUMPY_TAIL = struct.Struct("<iid")
_MT19937 = 625 * 4
"""Bytes of a Mersenne twister in memory: its words and the position in them."""


Parts = tuple[bytes, bytes, bytes, bytes]
"""States of python's, torch's, the CUDA device's and numpy's generator."""


class Generators:
    """Captures again and again. Python's and numpy's generators are asked only when their memory has moved: a tenth of the time."""

    def __init__(self) -> None:
        self._python, self._numpy = _Python(), _Numpy()

    def parts(self) -> Parts:
        """The state of each generator: equal ones mean equal draws to come."""
        return self._python.read(), _torch(), _cuda(), self._numpy.read()


class _Python:
    """CPython keeps position and words right behind the object's head; where that does not hold, every read asks the generator."""

    def __init__(self) -> None:
        self._generator: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
        self._at = id(self._generator) + object.__basicsize__
        self._readable = type(self._generator).__basicsize__ >= object.__basicsize__ + _MT19937
        self._memory: bytes | None = None
        self._gauss: float | None = None
        self._state = b""

    def read(self) -> bytes:
        memory = ctypes.string_at(self._at, _MT19937) if self._readable else b""
        gauss: float | None = self._generator.gauss_next  # type: ignore[attr-defined]
        if memory != self._memory or gauss != self._gauss:
            self._state, self._gauss = _python(), gauss
            words = self._state[:_MT19937]
            self._memory = memory if memory == words[-4:] + words[:-4] else None
        return self._state


class _Numpy:
    """Numpy's global generator."""

    def __init__(self) -> None:
        self._memory = self._state = b""
        self._known = False

    def read(self) -> bytes:
        """The present state, empty without numpy."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return b""
        generator = numpy.random.get_bit_generator()
        plain = type(generator).__name__ == "MT19937"
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937) if plain else b""
        if not self._known or memory != self._memory:
            self._memory, self._state = memory, _numpy()
            # A second normal number in store is used up without a trace in the memory: ask again until it is gone.
            self._known = plain and not _NUMPY_TAIL.unpack_from(self._state, len(self._state) - _NUMPY_TAIL.size)[1]
        return self._state


def capture() -> bytes:
    """All generator states, as bytes: equal bytes mean equal draws to come."""
    return join((_python(), _torch(), _cuda(), _numpy()))


def join(parts: Parts) -> bytes:
    """Parts as ``restore`` takes them."""
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


def _torch() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


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
    if not torch.cuda.is_initialized():
        return b""
    return torch.cuda.get_rng_state().numpy().tobytes()
