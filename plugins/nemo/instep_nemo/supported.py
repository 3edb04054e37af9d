"""What cannot be recovered is refused before training begins, by name and with what to use instead."""

from typing import TYPE_CHECKING

from instep.errors import UsageError
from instep_lightning import supported
from instep_lightning.flavour import Foreign
from instep_nemo import twins

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.session import Session


def check(trainer: "Trainer") -> None:
    """Before set-up. Raises ``UsageError`` for a strategy, a callback or an option of the trainer that is not supported."""
    from nemo.lightning.pytorch.strategies import MegatronStrategy

    strategy: Foreign = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        supported.check(trainer)
        raise UsageError(
            f"instep_nemo's callback is for nemo.lightning.MegatronStrategy, this trainer has {type(strategy).__name__}: use the "
            "callback of instep-lightning (`from instep_lightning import InstepCallback`)"
        )
    if strategy._fsdp is not None:
        raise UsageError(
            "MegatronStrategy(fsdp='megatron') keeps its shards in buffers of its own, which no rank could restore: use the distributed "
            "optimizer with num_distributed_optimizer_instances=2"
        )
    if strategy.ddp_config is None:
        raise UsageError("MegatronStrategy(ddp='pytorch') has no Megatron DDP to recover: use ddp='megatron', the default")
    supported.check_options(trainer)


def check_built(trainer: "Trainer", session: "Session") -> None:
    """Behind set-up. Raises ``UsageError`` for an optimizer that is not Megatron's, or whose state one rank alone would have."""
    strategy: Foreign = trainer.strategy
    optimizers = strategy.optimizers
    if len(optimizers) != 1 or not hasattr(optimizers[0], "mcore_optimizer"):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise UsageError(f"MegatronStrategy with optimizers of its own ({kinds}): use one nemo.lightning.MegatronOptimizerModule")
    replica: Foreign = session.plugin("state_replica")
    twins.check(
        instances=strategy.num_distributed_optimizer_instances,
        distributed=bool(strategy.ddp_config.use_distributed_optimizer),
        kept=bool(replica is not None and (replica.buddies or replica.checkpoint is not None)),
    )
