"""Adoption: an object of Lightning gets a subclass of its own class, with some members more, and later its own class back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from instep_lightning.flavour import Foreign

_OWNER = "_instep"
_BELONGING = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}


def members(of: type) -> dict[str, object]:
    """What a class that is written for adoption adds."""
    return {name: member for name, member in vars(of).items() if name not in _BELONGING}


def inherited(obj: object) -> Foreign:
    """The object as its own class has it: ``super()`` for an adopted one."""
    return super(type(obj), obj)


@contextmanager
def adopted(obj: object, added: Mapping[str, object], owner: object) -> Iterator[None]:
    """``obj`` has the members ``added``, which find ``owner`` under ``_instep``; undone at the end."""
    base = type(obj)
    vars(obj)[_OWNER] = owner
    obj.__class__ = type(base.__name__, (base,), {**added, "__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__})
    try:
        yield
    finally:
        obj.__class__ = base
        del vars(obj)[_OWNER]
