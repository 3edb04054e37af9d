"""A pass over a loader that can be rewound: the iterator holds no position, its cursor does.

So an iterator that was made outside the block goes on with the right batch after a fault, and one that was made inside is simply made
again. What runs underneath (torch's own iterator with its worker processes) is opened when a batch is wanted and dropped by
``quiesce``.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from instep.errors import UsageError
from instep.torch.retired import Retired
from instep.torch.sampling import Position

_BASE = "_instep_base"
_CURSOR = "_instep_cursor"


class Pass(Iterator[object]):
    """What ``iter(loader)`` gives for an adopted loader."""

    def __init__(self, cursor: "PassCursor", number: int) -> None:
        self._cursor = cursor
        self._number = number

    def __next__(self) -> object:
        return self._cursor.following(self._number)

    def __del__(self) -> None:
        self._cursor.dropped(self._number)


class PassCursor(ABC):
    """The position in a loader, and the one pass that is under way."""

    def __init__(self, name: str, on_delivery: Callable[[], None]) -> None:
        self._name = name
        self._on_delivery = on_delivery
        self._number = 0
        self._inner: Iterator[object] | None = None
        self._started = False
        self._resume = False
        self._position = Position()
        self._retired = Retired()

    @property
    def delivered(self) -> int:
        """Batches of the present pass that the script has."""
        return self._position.delivered

    def begin(self) -> Pass:
        """``iter(loader)``: go on with the pass that a recovery came back to, else start the next one."""
        if not self._resume:
            if self._started:
                self._finish()
            self._let_go()
            self._started, self._position.delivered = True, 0
            self._start()
        self._resume = False
        self._number += 1
        if self._inner is None:
            self._inner = self._open()
        return Pass(self, self._number)

    def again(self) -> Pass:
        """A further iterator of the present pass, wherever it stands; for a framework whose own iterators a fault has cut."""
        self._resume = False
        return Pass(self, self._number)

    def following(self, number: int) -> object:
        """``next(iterator)``: the batch after those delivered. Raises ``UsageError`` for an iterator that a newer one replaced."""
        if number != self._number:
            raise UsageError(
                f"loader {self._name!r}: an older iterator is used although iter() was called again; a protected loader has one pass "
                "at a time, make a second loader for a second pass"
            )
        if not self._started:
            raise StopIteration
        self._on_delivery()
        if self._inner is None:
            self._inner = self._open()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._finish()
            raise
        self._on_delivery()
        self._position.delivered += 1
        return batch

    def dropped(self, number: int) -> None:
        """The script let go of an iterator: its workers are not needed any more."""
        if number == self._number and threading.current_thread() is threading.main_thread():
            self._let_go()

    def quiesce(self) -> None:
        """Drop what runs underneath without waiting for it. For the main thread, after it unwound; safe to repeat."""
        self._drop()

    def _finish(self) -> None:
        self._started = self._resume = False
        self._position.delivered = 0
        self._let_go()

    def _let_go(self) -> None:
        if self._keeps_workers():
            self._inner = None
        else:
            self._drop()

    def _drop(self) -> None:
        inner, self._inner = self._inner, None
        self._retired.collect()
        self._retired.add(inner)

    def _rewound(self, *, started: bool) -> None:
        self._drop()
        self._started = self._resume = started

    def _keeps_workers(self) -> bool:
        """Whether what runs underneath serves the next pass too."""
        return False

    @abstractmethod
    def _start(self) -> None:
        """Begin a new pass: draw and note what its order depends on."""

    @abstractmethod
    def _open(self) -> Iterator[object]:
        """The loader's own iterator, standing behind the batches delivered."""


def adopt_class(name: str, obj: object, cursor: PassCursor, **members: object) -> None:
    """Swap the class of ``obj`` for a subclass whose ``__iter__`` asks the cursor, which ``obj`` owns from now on.

    A cursor refers to its loader weakly: an iterator with worker processes must not end in a reference cycle, since the garbage
    collector might then run its destructor in a forked child.
    """
    if not hasattr(obj, "__dict__"):
        raise UsageError(f"session.protect({name}=...): a {type(obj).__name__} has no __dict__ and cannot be adopted; drop its __slots__")
    base = type(obj)
    vars(obj)[_CURSOR] = cursor
    body = {"__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__, "__iter__": lambda self: cursor_of(self).begin()}
    obj.__class__ = type(base.__name__, (base,), {_BASE: base, **body, **members})


def cursor_of(obj: object) -> PassCursor:
    """The cursor of an adopted loader."""
    cursor = vars(obj)[_CURSOR]
    assert isinstance(cursor, PassCursor)
    return cursor


def is_adopted(obj: object) -> bool:
    """Whether the class of ``obj`` was swapped."""
    return _BASE in vars(type(obj))


def release_class(obj: object) -> None:
    """Give ``obj`` its own class back."""
    obj.__class__ = vars(type(obj))[_BASE]
    del vars(obj)[_CURSOR]
