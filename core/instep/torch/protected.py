"""The kinds of objects that can be protected as shared: how each one tells its state as a tree, and takes a donor's over.

Tensors in a tree are the live ones. Modules are not here: their parameters are tensors of their own.
"""

from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from instep.errors import UsageError


@runtime_checkable
class Stateful(Protocol):
    """What schedulers, scalers and the user's own classes offer."""

    def state_dict(self) -> Mapping[str, object]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take the state over."""


class Protected(Protocol):
    """One protected object."""

    def tree(self) -> object:
        """The present state, made of what the codec knows."""

    def check(self, tree: object) -> None:
        """Raise ``UsageError`` if a donor's state cannot be that of this object. Changes nothing."""

    def load(self, tree: object) -> None:
        """Take a donor's state over; the tree is this object's to keep."""


class OptimizerState:
    """An optimizer: its state for each parameter and every value of its groups, exactly as the donor has them.

    State that this rank has not allocated is made, other state is dropped. Dtypes stay those of the donor, which
    ``Optimizer.load_state_dict`` does not promise. The state of sharded parameters is left out: it is in groups of its own.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._names: Mapping[int, str] = {}

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Names by ``id``: state is kept by number, so a donor's parameters must be the same ones in the same order."""
        self._names = names

    def tree(self) -> dict[str, object]:
        """Names of the parameters, state by number, groups without their parameters, and state under other keys."""
        state = self._optimizer.state
        return {
            "parameters": [self._names.get(id(p), "") for p in self.parameters()],
            "state": [self.of(p) for p in self._replicated()],
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups],
            "sizes": [len(group["params"]) for group in self._optimizer.param_groups],
            "other": {key: state[key] for key in self._others()},
        }

    def check(self, tree: object) -> None:
        """The groups must have the donor's parameters, in the donor's order."""
        own, theirs = self.tree(), tree if isinstance(tree, dict) else {}
        if own["sizes"] != theirs.get("sizes"):
            raise UsageError(
                f"{self._name}: the donor's parameter groups have {theirs.get('sizes')} parameters, this rank's have {own['sizes']}; build "
                "the optimizer alike on all ranks, and call add_param_group outside of the block"
            )
        for number, (mine, other) in enumerate(zip(self.parameters(), theirs["parameters"], strict=True)):
            if (name := self._names.get(id(mine), "")) != other:
                raise UsageError(
                    f"{self._name}: parameter {number} is {other!r} on the donor, {name!r} on this rank; give the optimizer its parameters "
                    "in one order on all ranks"
                )

    def load(self, tree: object) -> None:
        """Groups keep their identity: schedulers hold on to them."""
        assert isinstance(tree, dict)
        for group, values in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **values)
        for parameter, values in zip(self._replicated(), tree["state"], strict=True):
            self.put(parameter, values)
        state = self._optimizer.state
        for key in self._others():
            del state[key]
        state.update(tree["other"])

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def of(self, parameter: Tensor) -> dict[str, object] | None:
        """What the optimizer keeps for a parameter; ``None`` before its first step."""
        return self._optimizer.state.get(parameter)

    def put(self, parameter: Tensor, values: dict[str, object] | None) -> None:
        """Make exactly these values the parameter's state; ``None`` takes it away."""
        state = self._optimizer.state
        if values is None:
            state.pop(parameter, None)
        elif parameter in state:
            state[parameter].clear()
            state[parameter].update(values)
        else:
            state[parameter] = values

    def _replicated(self) -> list[Tensor]:
        return [p for p in self.parameters() if not isinstance(p, DTensor)]

    def _others(self) -> list[Any]:
        keys: list[object] = list(self._optimizer.state)
        return [key for key in keys if not isinstance(key, Tensor)]


class DictState:
    """Any object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, obj: Stateful) -> None:
        self._obj = obj

    def tree(self) -> object:
        """Its ``state_dict``."""
        return self._obj.state_dict()

    def check(self, tree: object) -> None:
        """The object itself must judge."""

    def load(self, tree: object) -> None:
        """Through its ``load_state_dict``."""
        assert isinstance(tree, dict)
        self._obj.load_state_dict(tree)


class PlainState:
    """A container of plain data, restored in place, so that those who hold it see the change."""

    def __init__(self, obj: object) -> None:
        self._obj = obj

    def tree(self) -> object:
        """The container itself."""
        return self._obj

    def check(self, tree: object) -> None:
        """Any content fits."""

    def load(self, tree: object) -> None:
        """Empty it, then fill it."""
        obj = self._obj
        if isinstance(obj, MutableMapping) and isinstance(tree, Mapping):
            obj.clear()
            # Item by item: Counter.update would add.
            for key, value in tree.items():
                obj[key] = value
        elif isinstance(obj, MutableSequence) and isinstance(tree, list | deque):
            obj.clear()
            obj.extend(tree)
        elif isinstance(obj, MutableSet) and isinstance(tree, set):
            obj.clear()
            obj |= tree


def kind(name: str, obj: object) -> Protected:
    """How to protect an object that is neither a module nor a tensor.

    Raises:
        UsageError: the object has no state that could be restored.
    """
    if isinstance(obj, Optimizer) and type(obj).state_dict is Optimizer.state_dict:
        return OptimizerState(name, obj)
    if isinstance(obj, Stateful) and not isinstance(obj, type):
        return DictState(obj)
    if isinstance(obj, MutableMapping | MutableSequence | MutableSet) and not isinstance(obj, bytearray):
        return PlainState(obj)
    what = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if obj is None or isinstance(obj, bool | int | float | str | bytes | tuple | frozenset):
        raise UsageError(f"{name}: a value of type {what} cannot change in place; keep it in a dict and protect that")
    raise UsageError(
        f"{name}: {what} has no state that can be restored; give it state_dict() and load_state_dict(), or protect the parts that have"
    )
