"""The callback that switches recovery on for NeMo: in a trainer's list of callbacks, or in a recipe's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from instep_lightning import InstepCallback as LightningCallback
from instep_lightning.adopt import members
from instep_lightning.fit import Fit
from instep_lightning.flavour import Foreign
from instep_lightning.strategy import Averaging
from instep_nemo import supported
from instep_nemo.fit import NemoFit
from instep_nemo.strategy import Joined

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class InstepCallback(LightningCallback):
    """Makes ``trainer.fit`` of a NeMo trainer recoverable, in a script that ``instep run`` starts.

    ``nl.Trainer(callbacks=[InstepCallback()], strategy=nl.MegatronStrategy(...), ...)``, or in a recipe
    ``recipe.trainer.callbacks.append(run.Config(InstepCallback))``. Making it joins the job, so make it before anything else talks to
    other ranks. Without ``instep run`` it does nothing, and warns once.
    """

    training: ClassVar[type[Fit]] = NemoFit
    outside: ClassVar[Mapping[str, object]] = members(Averaging) | members(Joined)

    def check(self, trainer: "Trainer") -> None:
        """Raise ``UsageError`` for a trainer whose training cannot be recovered, before anything of it is built."""
        supported.check(trainer)

    def __deepcopy__(self, memo: dict[int, object]) -> Foreign:
        """A description: NeMo's trainer copies its arguments to tell in a checkpoint how it was made, and a job is joined once."""
        import fiddle

        return fiddle.Config(type(self))
