"""Whether each shard of the optimizer's state is on more than one rank, or a copy of it is kept."""

from instep.errors import UsageError


def check(*, instances: int, distributed: bool, kept: bool) -> None:
    """Raise ``UsageError`` if the optimizer's state is on one rank only. ``kept``: `state_replica` keeps buddies or checkpoints."""
    if distributed and instances == 1 and not kept:
        raise UsageError(
            "MegatronStrategy(num_distributed_optimizer_instances=1): each shard of the distributed optimizer is on one rank alone, and "
            "lost with it. Set num_distributed_optimizer_instances=2, so that each shard has a twin, or have copies kept on another rank: "
            "plugins.state_replica.buddies = true"
        )
