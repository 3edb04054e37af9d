"""The strategy's ``optimizer_step``, through which every optimizer step of Lightning goes: here a commit opens.

Lightning hands forward and backward to the optimizer as a closure. A commit may hold local updates alone, so they run before it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from instep.errors import UsageError
from instep_lightning.adopt import inherited
from instep_lightning.flavour import Foreign

if TYPE_CHECKING:
    from instep_lightning.fit import Fit


class Averaging:
    """Any strategy under instep, whose process group is not called gloo: Lightning would leave the division to it, which gloo refuses."""

    def reduce(self: Foreign, tensor: Foreign, group: Foreign = None, reduce_op: Foreign = "mean") -> Foreign:
        """As Lightning does it for gloo: the sum, then a division that integers survive."""
        if not (isinstance(tensor, Tensor) and tensor.device.type == "cpu" and reduce_op in ("mean", "avg")):
            return inherited(self).reduce(tensor, group, reduce_op)
        total = inherited(self).reduce(tensor, group, "sum")
        size = dist.get_world_size(group)
        return total.div_(size) if total.is_floating_point() else total.copy_(total / size)


class RecoverableStrategy:
    """Any supported strategy."""

    _instep: "Fit"

    def optimizer_step(
        self: Foreign, optimizer: Optimizer, closure: Callable[[], Foreign], model: Foreign = None, **kwargs: Foreign
    ) -> Foreign:
        """As the strategy's own, with a commit around the update; in manual optimization tentative until the batch is done."""
        fit, module = self._instep, model or self.lightning_module
        if not fit.inside:
            return inherited(self).optimizer_step(optimizer, closure, model, **kwargs)
        if not self.lightning_module.automatic_optimization:
            fit.tentative(optimizer)
            return inherited(self).optimizer_step(optimizer, closure, model, **kwargs)
        precision = self.precision_plugin
        if (scaler := getattr(precision, "scaler", None)) is not None:
            return _scaled(fit, scaler, optimizer, precision=precision, module=module, closure=closure, kwargs=kwargs)
        with torch.enable_grad():
            result = precision._wrap_closure(module, optimizer, closure)
        fit.open()
        return optimizer.step(closure=_once(result, optimizer), **kwargs)


def _scaled(
    fit: "Fit", scaler: Foreign, optimizer: Optimizer, *, precision: Foreign, module: Foreign, closure: Foreign, kwargs: dict[str, Foreign]
) -> Foreign:
    """``MixedPrecision.optimizer_step`` with the commit in it."""
    with torch.enable_grad():
        result = closure()
        skip = result is None
        if not skip and not getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        precision._after_closure(module, optimizer)
    fit.open()
    if skip:
        return result
    output = scaler.step(optimizer, **kwargs)
    scaler.update()
    return output


def _once(result: Foreign, optimizer: Optimizer) -> Callable[[], Foreign]:
    """Stands in for a closure that has run."""
    calls = iter((result,))

    def again() -> Foreign:
        for known in calls:
            return known
        raise UsageError(f"{type(optimizer).__qualname__} runs its closure more than once in a step, which cannot be committed")

    return again
