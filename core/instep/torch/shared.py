"""Shared state: what changes in commits alone, is equal on all replicas, and comes from a donor after a fault.

Everything that is protected belongs to a shard group. The world's group holds parameters, tensors and adopted buffers by name, and the
free-form state of all other objects; parameters that are sharded, and what optimizers keep for them, are in groups of their own.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep import codec
from instep.errors import UsageError
from instep.torch import ddp, fsdp, sharding
from instep.torch.adapter import Adapter, Covering, Tree, tree
from instep.torch.dtensor import local, sharded
from instep.torch.names import Names
from instep.torch.overlay import branch
from instep.torch.protected import OptimizerState, Protected, kind
from instep.torch.share import Share

WORLD = "replica"
"""Name of the group of all ranks."""


class Shared:
    """All objects given to ``protect`` as shared, in the order in which they were given.

    ``ranks`` is the world. ``census`` finds modules of DistributedDataParallel that were not protected themselves; start it before any
    is built.
    """

    name = WORLD

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.census = ddp.Census()
        self.rank, self.replicas = rank, tuple(range(world_size))
        self._modules: dict[str, nn.Module] = {}
        self._names = Names()
        self._looked: Mapping[str, Tensor] = {}
        self._whole: Tree = {}
        self._buffers: dict[str, Tensor] = {}
        self._objects: dict[str, Protected] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._adapters: dict[str, Adapter] = {}
        self._covered: set[int] = set()
        self._kinds: dict[str, str] = {}
        self._reducers: list[ddp.Reducer] = []
        self._world = Share(self, self._reducers)
        self._others: list[Share] = []
        self._checked = False

    def add(self, name: str, obj: object) -> None:
        """Protect an object as shared state.

        Raises:
            UsageError: it has no state, or a type in its state cannot be kept, or it is a DDP that recovery could not set.
        """
        if name in self._kinds:
            raise UsageError(f"{name}: two objects are protected under this name")
        if isinstance(obj, nn.Module):
            for path, module in obj.named_modules():
                ddp.check(module, f"{name}.{path}" if path else name)
                fsdp.check(module, f"{name}.{path}" if path else name)
            codec.split({key: local(p) for key, p in _bare(obj).named_parameters()}, where=name)
            self._modules[name] = obj
            self._names.add(name, _bare(obj))
        elif isinstance(obj, Tensor):
            codec.split(local(obj), where=name)
            self._names.add(name, obj)
        elif isinstance(obj, Adapter):
            self._adapters[name] = obj
        else:
            state = kind(name, obj)
            codec.split(state.tree(), where=name)
            self._objects[name] = state
            if isinstance(obj, Optimizer):
                self._optimizers[name] = obj
        self._kinds[name] = f"{type(obj).__module__}.{type(obj).__qualname__}"

    def adopt_buffer(self, name: str, tensor: Tensor) -> None:
        """Share a buffer that turned out to change in commits; ``name``: the protected name of its module, a dot, its own name."""
        self._buffers[name] = tensor
        self._world.changed()

    @property
    def adopted(self) -> Mapping[str, Tensor]:
        """The buffers that are shared; after a donor's state was accepted exactly those that the donor shares."""
        return dict(self._buffers)

    @property
    def world(self) -> Share:
        """The group of all ranks."""
        return self._world

    def shares(self) -> list[Share]:
        """All shard groups of this rank, the world's first; complete once ``check_coverage`` was called."""
        return [self._world, *self._others]

    def check_coverage(self) -> None:
        """Fix what is shared, at the first block; call it once, before the first forward of the block.

        Raises:
            UsageError: a parameter of a protected optimizer, or of a DDP, belongs to nothing that is protected.
        """
        every = self._everything()
        covered = {id(tensor) for tensor in every.values()}
        for name, optimizer in self._optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) not in covered:
                        raise UsageError(
                            f"{name}: parameter {i} of group {g} (shape {tuple(parameter.shape)}) belongs to no protected module; "
                            "protect the module that it is part of"
                        )
        self.census.stop()
        reducers = [ddp.Reducer(wrapped, name) for name, wrapped in self._wrapped()]
        for reducer in reducers:
            ddp.check(reducer.ddp, reducer.name)
            for key, parameter in reducer.ddp.module.named_parameters():
                if id(parameter) not in covered:
                    raise UsageError(f"{reducer.name}: parameter {key!r} of a DistributedDataParallel is not protected; protect the module")
        self._reducers[:] = reducers
        self._covered = {id(p) for adapter in self._adapters.values() if isinstance(adapter, Covering) for p in adapter.covers()}
        self._looked = {}
        states = {name: state for name, state in self._objects.items() if isinstance(state, OptimizerState)}
        for state in states.values():
            state.name_parameters({id(tensor): name for name, tensor in every.items()})
        groups = [group for adapter in self._adapters.values() for group in adapter.groups()]
        self._others = [Share(group) for group in [*sharding.groups(every, states, rank=self.rank, world=self.replicas), *groups]]

    def joining(self) -> bool:
        """Whether some DDP is inside its ``join()``, where finished ranks shadow the collectives of the others."""
        return any(reducer.ddp._join_config.enable for reducer in self._reducers)

    def prepare(self) -> None:
        """At a commit's entry, before its barrier: note what reducers have done in this step. A framework may have it noted earlier."""
        for reducer in self._reducers:
            reducer.prepare()

    def commit(self) -> None:
        """The step that was prepared is committed.

        Raises:
            UsageError: an object holds a type that cannot be kept since its first step, in which optimizers allocate their state.
        """
        for share in self.shares():
            share.changed()
        for reducer in self._reducers:
            reducer.commit()
        if not self._checked:
            self._checked = True
            for share in self.shares():
                share.examine()

    def restart(self) -> None:
        """The state was loaded by the script: reducers begin as those that were just built, on every rank."""
        for reducer in self._reducers:
            reducer.apply([None, True])
        for share in self.shares():
            share.changed()

    def digest_ahead(self, go_on: Callable[[], object]) -> None:
        """Compute the next digest of each group now, unless ``go_on`` raises."""
        for share in self.shares():
            share.digest_ahead(go_on)

    def digests(self) -> dict[str, str]:
        """A digest (hex) of each tensor, and of each object's other values, by dotted name."""
        out: dict[str, str] = {}
        for share in self.shares():
            out |= {(path if path not in out else f"{path}@{share.name}"): digest for path, digest in share.digests().items()}
        return out

    def tree(self) -> Tree:
        """The world's group: see ``adapter.ShardGroup``."""
        return self._tree(self._buffers)

    def fit(self, theirs: Tree) -> Tree:
        """Own state, with the buffers that the donor shares."""
        states, buffers = branch(theirs, "objects"), branch(theirs, "buffers")
        for name, obj in self._objects.items():
            obj.check(states.get(name))
        return self._tree({name: b for name, b in self._all_buffers().items() if name in buffers})

    def load(self, tree: Tree) -> None:
        """Take over what a donor shares."""
        states, buffers, own = branch(tree, "objects"), branch(tree, "buffers"), self._all_buffers()
        for name, obj in self._objects.items():
            obj.load(states[name])
        self._buffers = {name: own[name] for name in buffers}

    def _tree(self, buffers: Mapping[str, Tensor]) -> Tree:
        return tree(
            kinds=self._kinds,
            tensors=self._replicated(),
            buffers=dict(sorted(buffers.items())),
            objects={name: obj.tree() for name, obj in self._objects.items()},
        )

    def _everything(self) -> Mapping[str, Tensor]:
        """Parameters and protected tensors by name, each once."""
        fsdp.reshard(self._names.modules())
        return self._names.tensors()

    def _replicated(self) -> Tree:
        """Those that are whole on every rank, and that no adapter has."""
        every = self._everything()
        if every is not self._looked:
            self._looked = every
            self._whole = {name: t for name, t in every.items() if not sharded(t) and id(t) not in self._covered}
        return self._whole

    def _all_buffers(self) -> dict[str, Tensor]:
        """Every buffer by the names that it may be adopted under."""
        out: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            for root in (_bare(module), module):
                out |= {f"{name}.{key}": local(buffer) for key, buffer in root.named_buffers(remove_duplicate=False)}
        return out | self._buffers

    def _wrapped(self) -> list[tuple[str, DistributedDataParallel]]:
        """Every DDP once: those in protected modules, then those that the census found."""
        inside = [(f"{name}.{path}" if path else name, m) for name, root in self._modules.items() for path, m in root.named_modules()]
        every = [*inside, *((f"DistributedDataParallel number {i}", m) for i, m in enumerate(self.census.living()))]
        found: dict[int, tuple[str, DistributedDataParallel]] = {}
        for name, module in every:
            if isinstance(module, DistributedDataParallel):
                found.setdefault(id(module), (name, module))
        return list(found.values())


def _bare(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
