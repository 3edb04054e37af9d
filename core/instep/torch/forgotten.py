"""What a script most often forgets to protect: the optimizer that steps in its commits, and the schedule that sets its rates."""

import warnings
from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instep.errors import UsageError
from instep.torch.gate import Gate


class Forgotten:
    """Watches optimizers from the first block on; ``protected`` is what the script gave to ``session.protect``."""

    def __init__(self, gate: Gate, protected: Mapping[str, object]) -> None:
        self._gate, self._protected = gate, protected
        self._known: set[int] = set()
        self._parameters: dict[int, str] = {}
        self._hook = register_optimizer_step_pre_hook(self._stepping)

    def complete(self) -> None:
        """Everything is protected. Warns of a schedule that changes a protected optimizer and is not protected itself."""
        for name, obj in self._protected.items():
            if isinstance(obj, nn.Module):
                self._parameters |= {id(p): name for p in obj.parameters()}
            elif isinstance(obj, Optimizer):
                # ZeroRedundancyOptimizer steps by another one.
                self._known |= {id(obj), id(getattr(obj, "optim", None))}
                scheduled = hasattr(obj.step, "_wrapped_by_lr_sched")
                if scheduled and not any(getattr(other, "optimizer", None) is obj for other in self._protected.values()):
                    warnings.warn(
                        f"a schedule changes optimizer {name!r} but is not protected: session.protect(scheduler=...)", stacklevel=2
                    )

    def close(self) -> None:
        """Watch no longer."""
        self._hook.remove()

    def _stepping(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if not self._gate.body or id(optimizer) in self._known:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Tensor) and (module := self._parameters.get(id(parameter))):
                    raise UsageError(
                        f"{type(optimizer).__qualname__} steps in a commit and owns parameters of the protected {module!r}, but is not "
                        "protected itself: a replacement would start with an empty one. Add session.protect(optimizer=...)"
                    )
