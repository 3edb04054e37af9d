"""NeMo's strategy: it finds the process group made, and hands the commit to Megatron's optimizer."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from instep_lightning.adopt import inherited
from instep_lightning.flavour import Foreign
from instep_nemo.mapped import mapped

if TYPE_CHECKING:
    from instep_nemo.fit import NemoFit


class Joined:
    """The process group is there before the strategy: NeMo then leaves out what it does behind making one."""

    def setup_distributed(self: Foreign) -> None:
        """As NeMo's, with Megatron's groups and the data sampler."""
        inherited(self).setup_distributed()
        from nemo.lightning.pytorch.strategies.utils import init_model_parallel

        init_model_parallel(self.model)
        if self.data_sampler:
            self.data_sampler.setup(self.cluster_environment.global_rank())


class CommittingStrategy:
    """The commit opens inside of Megatron's ``optimizer.step()``, once gradients are reduced; NeMo logs their norm behind it."""

    _instep: "NemoFit"

    def optimizer_step(
        self: Foreign, optimizer: Optimizer, closure: Callable[[], Foreign], model: Foreign = None, **kwargs: Foreign
    ) -> Foreign:
        """As NeMo's own, with a commit around what follows forward and backward."""
        fit = self._instep

        def gradients() -> Foreign:
            result = closure()
            fit.open()
            return result

        return inherited(self).optimizer_step(optimizer, gradients if fit.inside else closure, model, **kwargs)

    def process_dataloader(self: Foreign, dataloader: Foreign) -> Foreign:
        """As NeMo's own; training data may come through `mmap_loader`."""
        made = inherited(self).process_dataloader(dataloader)
        return mapped(made, self._instep.session) if self._instep.trainer.training else made
