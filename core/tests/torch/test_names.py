"""A module's names are those of this moment, whatever was changed in it since they were looked up last."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from instep.torch.names import Names

Change = Callable[[nn.Sequential], object]


def _module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), nn.Linear(3, 2))


def _nothing(module: nn.Sequential) -> None:
    """The module stays as it is."""


def _replace(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.ones(2, 3))


def _tie(module: nn.Sequential) -> None:
    module[2].weight = module[0].weight


def _rename(module: nn.Sequential) -> None:
    own = module[0]._parameters
    own["other"] = own.pop("bias")


def _deepen(module: nn.Sequential) -> None:
    inside = module[1]
    assert isinstance(inside, nn.Sequential)
    inside.append(nn.Linear(3, 3))


CHANGES: list[Change] = [
    _nothing,
    _replace,
    _tie,
    _rename,
    _deepen,
    lambda module: module.append(nn.Linear(2, 2)),
    lambda module: module.__delitem__(1),
    lambda module: module[1].register_parameter("extra", nn.Parameter(torch.zeros(1))),
    lambda module: module[0].register_parameter("bias", None),
    lambda module: module.__setitem__(0, nn.Linear(2, 3)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_names_of_this_moment(change: Change) -> None:
    module, alone = _module(), torch.ones(1)
    names = Names()
    names.add("model", module)
    names.add("alone", alone)
    before = names.tensors()
    change(module)
    found = names.tensors()
    wanted = [(f"model.{name}", id(p)) for name, p in module.named_parameters()]
    assert [(name, id(p)) for name, p in found.items()] == [*wanted, ("alone", id(alone))]
    assert list(map(id, names.modules())) == list(map(id, module.modules()))
    assert (found is before) is (change is _nothing)


def test_what_two_modules_share_goes_by_its_first_name() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    names = Names()
    names.add("second", second)
    names.add("first", first)
    names.add("again", first.bias)
    assert list(names.tensors()) == ["second.weight", "second.bias", "first.bias"]


def test_a_module_without_parts() -> None:
    module = nn.ReLU()
    names = Names()
    names.add("model", module)
    assert not names.tensors()
    module.register_parameter("slope", nn.Parameter(torch.ones(1)))
    assert list(names.tensors()) == ["model.slope"]
