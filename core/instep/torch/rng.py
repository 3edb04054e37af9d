"""Every random generator that a process has without being told: python, numpy, torch, and the CUDA device in use."""

import ctypes
import os
import random
import struct
import sys
from abc import ABC, abstractmethod
from typing import Any

import torch

_LENGTH = struct.Struct("<I")
_PYTHON = struct.Struct("<625I?d")
_NUMPY_TAIL = struct.Struct("<iid")
_MT19937 = 625 * 4
"""Bytes of a Mersenne twister in memory: its words and the position in them."""
_TORCH = struct.Struct("<QiiQ624Q")
_TORCH_HEAD = struct.Struct("<Qi?3xI")
_TORCH_STATE, _TORCH_STORE, _NORMALS = 5056, 28, (5040, 5052)
"""Sizes of torch's state and of its store of normal numbers; bytes of the state that tell of one (ATen/CPUGeneratorImpl.cpp, .h)."""
_NEAR = 256
"""The words of torch's engine begin at most so many bytes behind the head of its object."""
_WATCHED = 64
"""Bytes of a Mersenne twister to look at: its position and more than ten of its words. A draw moves the position, 624 draws all words."""


Parts = tuple[bytes, bytes, bytes, bytes]
"""States of python's, torch's, the CUDA device's and numpy's generator."""


class Generators:
    """Captures again and again: a generator is asked only when its memory has moved, and an unmoved one gives the same object again."""

    def __init__(self) -> None:
        self._python, self._torch, self._numpy = _Python(), _Torch(), _Numpy()
        self._views: tuple[memoryview, ...] = ()
        self._seen: object = None
        self._parts: Parts = (b"",) * 4

    def parts(self) -> Parts:
        """The state of each generator: equal ones mean equal draws to come."""
        seen = b"".join(self._views), self._python.gauss, self._numpy.current()
        if seen != self._seen or torch.cuda.is_initialized():
            self._parts = self._python.read(), self._torch.read(), _cuda(), self._numpy.read()
            watched = self._python, self._torch, self._numpy
            before, self._views = self._views, tuple(view for w in watched for view in w.views)
            self._seen = seen if before == self._views and all(w.watches for w in watched) else None
        return self._parts


class _Watched(ABC):
    """One generator and its places in memory, where they were found."""

    def __init__(self) -> None:
        self.views: tuple[memoryview, ...] = ()
        self._seen: object = None
        self._state = b""

    @property
    def watches(self) -> bool:
        """Whether what is looked at tells all."""
        return bool(self._seen)

    def read(self) -> bytes:
        """The present state."""
        seen = self._look()
        if not seen or seen != self._seen:
            self._state = self._ask()
            self._seen = None if self._stores() else seen
        return self._state

    def _look(self) -> object:
        return b"".join(self.views)

    @abstractmethod
    def _ask(self) -> bytes:
        """What the generator itself says."""

    def _stores(self) -> bool:
        """Whether a normal number is in store, which may be used up without a trace in what is looked at: ask again until it is gone."""
        return False


class _Python(_Watched):
    """CPython keeps position and words right behind the object's head; where that does not hold, every read asks the generator."""

    def __init__(self) -> None:
        super().__init__()
        self._generator: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
        at = id(self._generator) + object.__basicsize__
        if type(self._generator).__basicsize__ >= object.__basicsize__ + _MT19937:
            words = _python()[:_MT19937]
            if ctypes.string_at(at, _MT19937) == words[-4:] + words[:-4]:
                self.views = (_memory(at, _WATCHED),)

    @property
    def gauss(self) -> float | None:
        """The second normal number of a pair, which is kept outside of the generator's words."""
        kept: float | None = self._generator.gauss_next  # type: ignore[attr-defined]
        return kept

    def _look(self) -> object:
        return self.views and (bytes(self.views[0]), self.gauss)

    def _ask(self) -> bytes:
        return _python()


class _Torch(_Watched):
    """Torch's CPU generator, found in memory by what it says itself: its engine, and the normal numbers that it has in store behind."""

    def __init__(self) -> None:
        super().__init__()
        if (at := _engine(torch.default_generator)) is not None:
            self.views = _memory(at, _WATCHED), _memory(at + _TORCH_HEAD.size + 624 * 4, _TORCH_STORE)

    def _ask(self) -> bytes:
        return _torch()

    def _stores(self) -> bool:
        return any(self._state[at] for at in _NORMALS)


class _Numpy(_Watched):
    """Numpy's global generator, which may be there later than this one, and may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self._generator: object = None

    def current(self) -> object:
        """Numpy's present generator."""
        numpy = sys.modules.get("numpy")
        return None if numpy is None else numpy.random.get_bit_generator()

    @property
    def watches(self) -> bool:
        """As without numpy."""
        return self._generator is None or super().watches

    def read(self) -> bytes:
        """The present state, empty without numpy."""
        generator: Any = self.current()
        if generator is not self._generator:
            self._generator, self._seen, self.views = generator, None, ()
            if type(generator).__name__ == "MT19937":  # words, then the position
                self.views = (_memory(generator.ctypes.state_address + _MT19937 - _WATCHED, _WATCHED),)
        return super().read()

    def _ask(self) -> bytes:
        return _numpy()

    def _stores(self) -> bool:
        return bool(_NUMPY_TAIL.unpack_from(self._state, len(self._state) - _NUMPY_TAIL.size)[1])


def _engine(generator: torch.Generator) -> int | None:
    """Where the live engine of a CPU generator lies (``at::mt19937_data_pod``: seed, words left, whether seeded, next word, words)."""
    state = generator.get_state().numpy().tobytes()
    if len(state) != _TORCH_STATE:
        return None
    seed, left, seeded, following, *words = _TORCH.unpack_from(state)
    told = struct.pack("<624I", *words)
    head: int = generator._cdata  # type: ignore[attr-defined]
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # unlike a pointer, it may be read where nothing is
        near = os.pread(memory.fileno(), _NEAR + len(told), head)
    at = near.find(told) - _TORCH_HEAD.size
    known = at >= 0 and _TORCH_HEAD.unpack_from(near, at) == (seed, left, bool(seeded), following)
    return head + at if known else None


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


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
