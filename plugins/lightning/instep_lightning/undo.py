"""Shared state that Lightning changes between two commits, and its way back on a survivor.

Schedules that follow a metric step behind a validation; in manual optimization the script's own code steps its optimizers wherever it
likes. What a rank holds must be the state of its last commit when it votes, so a copy of that is kept: of rates and schedules always, and
in manual optimization of each optimizer, with its parameters, from its first step in a batch until the commit at the end of the batch.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Undo:
    """The way back to the last commit. ``stateful``: schedules and scalers."""

    def __init__(self, optimizers: Sequence[Optimizer], stateful: Sequence[Any]) -> None:
        self._optimizers, self._stateful = optimizers, stateful
        self._rates: list[list[dict[str, object]]] = []
        self._states: list[object] = []
        self._copies: dict[int, OptimizerCopy] = {}

    @property
    def tentative(self) -> bool:
        """Whether an optimizer has stepped since the last commit."""
        return bool(self._copies)

    def capture(self) -> None:
        """What is there now is the state of a commit."""
        self._copies.clear()
        self._rates = [[_without_parameters(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._states = [deepcopy(obj.state_dict()) for obj in self._stateful]

    def before_step(self, optimizer: Optimizer) -> None:
        """In manual optimization: an optimizer is about to step."""
        if id(optimizer) not in self._copies:
            self._copies[id(optimizer)] = OptimizerCopy(optimizer)

    def back(self) -> None:
        """Bring everything back; may be repeated."""
        for copy in self._copies.values():
            copy.back()
        self._copies.clear()
        for optimizer, rates in zip(self._optimizers, self._rates, strict=False):
            for group, values in zip(optimizer.param_groups, rates, strict=True):
                _update(group, values)
        for obj, state in zip(self._stateful, self._states, strict=False):
            obj.load_state_dict(deepcopy(state))


class OptimizerCopy:
    """Parameters and state of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in _parameters(optimizer)]
        self._state = {
            p: {key: _copy(value) for key, value in optimizer.state[p].items()} for p, _ in self._parameters if p in optimizer.state
        }

    @torch.no_grad()
    def back(self) -> None:
        """Everything as it was copied."""
        for parameter, was in self._parameters:
            parameter.copy_(was)
            if parameter in self._state:
                _update(self._optimizer.state[parameter], {key: _copy(value) for key, value in self._state[parameter].items()})
            else:
                self._optimizer.state.pop(parameter, None)


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _without_parameters(group: dict[str, Any]) -> dict[str, object]:
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _update(live: dict[str, Any], values: dict[str, object]) -> None:
    """Tensors are written in place: kernels may hold on to them."""
    for key in [key for key in live if key not in values and key != "params"]:
        del live[key]
    for key, value in values.items():
        mine = live.get(key)
        if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape and mine.dtype == value.dtype:
            with torch.no_grad():
                mine.copy_(value)
        else:
            live[key] = _copy(value)
