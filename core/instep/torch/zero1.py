"""``ZeroRedundancyOptimizer`` (ZeRO stage 1) as an adapter: each rank updates parameters of its own, and hands them to all others.

Its step is split on the instance: the local update stands behind the commit's barrier, the broadcasts behind the update. What a rank
owns, parameters and optimizer state, has no replica; parameters that others own arrive with the broadcasts of every recovery.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from instep.errors import UsageError
from instep.torch.adapter import Port, ShardGroup, Tree, name, tree
from instep.torch.overlay import branch
from instep.torch.private import Stateful
from instep.torch.protected import OptimizerState

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


class Zero(Protocol):
    """What is used of ``ZeroRedundancyOptimizer``, in the names of torch 2.13."""

    param_groups: list[dict[str, Any]]
    optim: Optimizer
    process_group: dist.ProcessGroup
    rank: int
    _overlap_with_ddp: bool
    _is_trainable_mask: list[bool]
    _param_to_index: Mapping[Tensor, int]
    _local_step: Callable[..., float | None]
    _sync_params: Callable[[], object]

    def _get_is_trainable_mask(self) -> list[bool]: ...

    def _partition_parameters(self) -> list[list[dict[str, Any]]]: ...

    def _sync_param_groups(self, source: list[dict[str, Any]], target: list[dict[str, Any]], /) -> None: ...


def sharded(obj: object) -> Zero | None:
    """The object, if it is a ``ZeroRedundancyOptimizer``. Imports nothing: the import takes long, and whoever has one has done it."""
    module = sys.modules.get(_MODULE)
    return obj if module is not None and isinstance(obj, module.ZeroRedundancyOptimizer) else None


def check_beside(protected: Mapping[str, object]) -> None:
    """Raises ``UsageError`` for what cannot be protected beside such an optimizer."""
    zeros = [key for key, obj in protected.items() if sharded(obj) is not None]
    scalers = [key for key, obj in protected.items() if isinstance(obj, GradScaler)]
    if zeros and scalers:
        raise UsageError(
            f"{scalers[0]}: a GradScaler leaves out steps of {zeros[0]!r}; a step of ZeroRedundancyOptimizer that is left out passes no "
            "barrier; train in bfloat16, which needs no scaler, or use fully_shard"
        )
    if len(zeros) > 1:
        raise UsageError(
            f"{zeros[1]}: a commit has one barrier, so one ZeroRedundancyOptimizer: give all parameters to {zeros[0]!r}, in several groups"
        )


class Zero1:
    """A protected ``ZeroRedundancyOptimizer``. Implements ``adapter.Covering``.

    Raises:
        UsageError: it steps within the backward pass (``overlap_with_ddp``).
    """

    def __init__(self, name: str, zero: Zero) -> None:
        if zero._overlap_with_ddp:
            raise UsageError(
                f"{name}: with overlap_with_ddp=True parameters change during the backward pass, before any rank knows whether all others "
                "will complete the step; build ZeroRedundancyOptimizer without it"
            )
        self._name, self._zero = name, zero
        self._rank, self._world = 0, tuple(range(1))
        self._sync: Callable[[], object] = zero._sync_params
        self._trained = list(zero._is_trainable_mask)

    def attach(self, port: Port, *, rank: int, world_size: int) -> None:
        """See ``adapter.Adapter``, as for all methods."""
        self._rank, self._world = rank, tuple(range(world_size))
        update = self._zero._local_step

        def local_step(*, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
            if closure is not None:
                raise UsageError(
                    f"{self._name}.step(closure) would train inside the commit's body; compute gradients before it, then step()"
                )
            if self._zero._get_is_trainable_mask() != self._trained:
                raise UsageError(
                    f"{self._name}: requires_grad of a parameter changed since the optimizer was built; freeze parameters before that"
                )
            with port.update():
                return update(**kwargs)

        def sync_params() -> None:
            port.publish(self._sync)

        self._zero._local_step, self._zero._sync_params = local_step, sync_params

    def groups(self) -> Sequence[ShardGroup]:
        """What this rank owns, and the values of the parameter groups, which are equal everywhere."""
        return [_Owned(self._name, self._zero, self._rank), _Groups(self._name, self._zero, self._world)]

    def covers(self) -> Sequence[Tensor]:
        """All parameters that are trained: the owners' broadcasts bring them."""
        return [p for group in self._zero.param_groups for p in group["params"] if p.requires_grad]

    def modules(self) -> Mapping[str, nn.Module]:
        """None: they are protected by themselves."""
        return {}

    def private(self) -> Mapping[str, Stateful]:
        """Nothing changes outside of commits."""
        return {}

    def publish(self) -> None:
        """Each rank's parameters to all ranks of its group."""
        self._sync()

    def reset(self) -> None:
        """A step that was cut leaves nothing behind but gradients."""


class _Owned:
    """One rank's partition: its trained parameters, by their number in the optimizer, and its local optimizer."""

    def __init__(self, what: str, zero: Zero, rank: int) -> None:
        self.name, self.replicas = name(f"{what}.partition", (rank,)), (rank,)
        self._key, self._zero, self._state = what, zero, OptimizerState(what, zero.optim)

    def tree(self) -> Tree:
        """See ``adapter.ShardGroup``."""
        number = self._zero._param_to_index
        tensors = {f"parameter {number[p]}": p for p in self._state.parameters() if p.requires_grad}
        return tree(kinds={"partition": _partition(self._zero)}, tensors=tensors, objects={self._key: self._state.tree()})

    def fit(self, theirs: Tree) -> Tree:
        """The local optimizer judges."""
        self._state.check(branch(theirs, "objects").get(self._key))
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Into the local optimizer."""
        self._state.load(branch(tree, "objects")[self._key])


class _Groups:
    """Learning rates and all other values of the parameter groups, which schedules change on the outer optimizer."""

    def __init__(self, what: str, zero: Zero, world: tuple[int, ...]) -> None:
        self.name, self.replicas = name(f"{what}.groups", world), world
        self._key, self._zero = what, zero

    def tree(self) -> Tree:
        """See ``adapter.ShardGroup``."""
        values = [{k: v for k, v in group.items() if k != "params"} for group in self._zero.param_groups]
        return tree(kinds={f"{self._key} groups": str(len(values))}, objects={self._key: values})

    def fit(self, theirs: Tree) -> Tree:  # noqa: ARG002 - the number of groups is compared by ``overlay``
        """Any values fit."""
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Groups keep their identity: schedules hold on to them."""
        values = branch(tree, "objects")[self._key]
        assert isinstance(values, list)
        for group, new in zip(self._zero.param_groups, values, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **new)
        self._zero._sync_param_groups(self._zero.param_groups, self._zero.optim.param_groups)


def _partition(zero: Zero) -> str:
    sizes = [sum(p.numel() for group in part for p in group["params"]) for part in zero._partition_parameters()]
    return f"{sizes[zero.rank]} of {sum(sizes)} values, over ranks {dist.get_process_group_ranks(zero.process_group)}"
