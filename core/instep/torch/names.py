"""Protected modules and tensors by name, looked up again only when a module has been changed.

Walking a module takes torch some milliseconds when it has many parts; it is asked for at every commit when copies are kept.
"""

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class Names:
    """Modules and tensors in the order in which they were added."""

    def __init__(self) -> None:
        self._roots: dict[str, nn.Module] = {}
        self._tensors: dict[str, Tensor] = {}
        self._modules: list[nn.Module] = []
        self._found: Mapping[str, Tensor] = {}
        self._seen: list[object] = []

    def add(self, name: str, obj: nn.Module | Tensor) -> None:
        """Go by the name ``name``, which nothing else has."""
        if isinstance(obj, nn.Module):
            self._roots[name] = obj
        else:
            self._tensors[name] = obj
        self._walk()

    def modules(self) -> Sequence[nn.Module]:
        """All modules, and what is inside them, each root's own once."""
        self._look()
        return self._modules

    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters, then tensors, each once; the same object again while nothing has changed."""
        self._look()
        return self._found

    def _look(self) -> None:
        present = self._present()
        if len(present) != len(self._seen) or not all(map(operator.is_, present, self._seen)):
            self._walk()

    def _walk(self) -> None:
        self._modules = [module for root in self._roots.values() for module in root.modules()]
        named = [(f"{name}.{key}", p) for name, root in self._roots.items() for key, p in root.named_parameters()]
        each: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in [*named, *self._tensors.items()]:
            each.setdefault(id(tensor), (name, tensor))
        self._found = dict(each.values())
        self._seen = self._present()

    def _present(self) -> list[object]:
        """All that names, parameters and modules inside depend on."""
        parts: list[object] = []
        for module in self._modules:
            own, inside = module._parameters, module._modules
            parts += (*own, *own.values(), *inside, *inside.values())
        return parts
