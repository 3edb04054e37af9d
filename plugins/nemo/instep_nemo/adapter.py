"""What NeMo's strategy has built, as the adapter of megatron-core takes it: chunks, the optimizer inside NeMo's own, all modules."""

from collections.abc import Mapping, MutableMapping

from torch import nn

from instep.torch.adapter import Port
from instep_lightning.flavour import Foreign
from instep_state_replica.megatron import Megatron
from instep_state_replica.megatron.foreign import Result


class NemoMegatron(Megatron):
    """The model and the optimizer of a strategy. ``told``: what the last update came to, which NeMo logs behind it."""

    def __init__(self, strategy: Foreign, told: MutableMapping[str, float | None]) -> None:
        self._model, self._inner, self._told = strategy.megatron_parallel, strategy.optimizers[0].mcore_optimizer, told
        super().__init__([chunk.module for chunk in self._model], self._inner)

    def attach(self, port: Port, *, rank: int, world_size: int) -> None:
        """As Megatron's; what the step returns is kept."""
        super().attach(port, rank=rank, world_size=world_size)
        whole = self._inner.step

        def step() -> Result:
            result: Result = whole()
            self._told["grad_norm"], self._told["num_zeros_in_grad"] = _plain(result[1]), _plain(result[2])
            return result

        self._inner.step = step

    def modules(self) -> Mapping[str, nn.Module]:
        """NeMo's modules around the chunks have flags too, which validation sets."""
        return {"model": self._model}


def _plain(value: Foreign) -> float | None:
    return None if value is None else float(value)
