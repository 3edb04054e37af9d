"""Shared state: what changes in commits alone, is equal on all replicas, and comes from a donor after a fault.

Everything that is protected is one tree: parameters, tensors and adopted buffers by name, and the free-form state of all other objects.
A donor sends the tree without its tensors (the schema) and the tensors, each once; a receiver takes the donor's tree exactly, into its
own tensors where they fit.
"""

from collections.abc import Callable, Mapping, Sequence

import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep import codec
from instep.errors import InstepError, UsageError
from instep.torch import ddp
from instep.torch.digest import digest
from instep.torch.overlay import Incoming, branch, leaves, take_apart, unpack
from instep.torch.protected import Protected, kind


class Shared:
    """All objects given to ``protect`` as shared, in the order in which they were given.

    ``census`` finds modules of DistributedDataParallel that were not protected themselves; start it before any is built.
    """

    def __init__(self) -> None:
        self.census = ddp.Census()
        self._modules: dict[str, nn.Module] = {}
        self._tensors: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._objects: dict[str, Protected] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._kinds: dict[str, str] = {}
        self._reducers: list[ddp.Reducer] = []
        self._incoming: Incoming | None = None
        self._ahead: int | None = None
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
            codec.split(dict(_bare(obj).named_parameters()), where=name)
            self._modules[name] = obj
        elif isinstance(obj, Tensor):
            codec.split(obj, where=name)
            self._tensors[name] = obj
        else:
            state = kind(name, obj)
            codec.split(state.tree(), where=name)
            self._objects[name] = state
            if isinstance(obj, Optimizer):
                self._optimizers[name] = obj
        self._kinds[name] = f"{type(obj).__module__}.{type(obj).__qualname__}"

    def adopt_buffer(self, name: str, tensor: Tensor) -> None:
        """Share a buffer that turned out to change in commits; ``name``: the protected name of its module, a dot, its own name."""
        self._buffers[name], self._ahead = tensor, None

    @property
    def adopted(self) -> Mapping[str, Tensor]:
        """The buffers that are shared; after ``accept`` exactly those that the donor shares."""
        return dict(self._buffers)

    def check_coverage(self) -> None:
        """Fix what is shared, at the first block; call it once, before the first forward of the block.

        Raises:
            UsageError: a parameter of a protected optimizer, or of a DDP, belongs to nothing that is protected.
        """
        covered = {id(tensor) for tensor in self._fixed().values()}
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
        self._reducers = reducers

    def joining(self) -> bool:
        """Whether some DDP is inside its ``join()``."""
        return any(ddp.joining(reducer.ddp) for reducer in self._reducers)

    def prepare(self) -> None:
        """At a commit's entry, before its barrier: note what reducers have done in this step."""
        for reducer in self._reducers:
            reducer.prepare()

    def commit(self) -> None:
        """The step that was prepared is committed.

        Raises:
            UsageError: an object holds a type that cannot be kept since its first step, in which optimizers allocate their state.
        """
        self._ahead = None
        for reducer in self._reducers:
            reducer.commit()
        if not self._checked:
            self._checked = True
            for name, obj in self._objects.items():
                codec.split(obj.tree(), where=name)

    def describe(self) -> tuple[bytes, Sequence[Tensor]]:
        """Donor: the schema of all shared state, and its tensors in schema order."""
        schema, tensors = take_apart(self._tree(self._buffers), [reducer.describe() for reducer in self._reducers])
        return schema.pack(), tensors

    def destination(self, schema: bytes, *, staged: bool) -> Sequence[Tensor]:
        """Receiver: tensors to receive into, in schema order; own ones where they fit, unless ``staged``.

        Raises:
            UsageError: the donor protects other objects, or objects of another structure; the first difference is named.
        """
        self._ahead, incoming = None, Incoming(unpack(schema))
        states, buffers = branch(incoming.theirs, "objects"), branch(incoming.theirs, "buffers")
        incoming.place(self._tree({name: b for name, b in self._all_buffers().items() if name in buffers}), staged=staged)
        for name, obj in self._objects.items():
            obj.check(states.get(name))
        self._incoming = incoming
        return incoming.landing

    def accept(self) -> None:
        """Receiver: take over what arrived in the tensors of the last ``destination``.

        Until this call nothing has changed on this rank but own tensors that were received into. An object whose
        ``load_state_dict`` fails leaves the rank torn.
        """
        incoming, self._incoming, self._ahead = self._incoming, None, None
        if incoming is None:
            raise InstepError("there is nothing to accept: destination() comes first")
        tree = incoming.settle()
        states, buffers, own = branch(tree, "objects"), branch(tree, "buffers"), self._all_buffers()
        for name, obj in self._objects.items():
            obj.load(states[name])
        self._buffers = {name: own[name] for name in buffers}

    def align(self, schema: bytes) -> None:
        """Every rank: bring reducers to the donor's gradient bucket layout.

        Raises:
            UsageError: the donor has other DistributedDataParallel modules.
        """
        described = unpack(schema).reducers
        if len(described) != len(self._reducers):
            raise UsageError(
                f"the donor has {len(described)} DistributedDataParallel modules, this rank {len(self._reducers)}; build them alike on "
                "all ranks before the first block"
            )
        for reducer, description in zip(self._reducers, described, strict=True):
            reducer.apply(description)

    def digest(self) -> int:
        """Order-sensitive 64-bit digest of all shared state, once from ``digest_ahead`` if that was done."""
        ahead, self._ahead = self._ahead, None
        return self._digest(bool) if ahead is None else ahead

    def digest_ahead(self, go_on: Callable[[], object]) -> None:
        """Compute the next ``digest`` now, unless ``go_on`` raises. Nothing that is shared may change until then but by this object."""
        self._ahead = None
        self._ahead = self._digest(go_on)

    def _digest(self, go_on: Callable[[], object]) -> int:
        state, tensors = codec.split(self._tree(self._buffers))
        return int(xxhash.xxh3_64_intdigest(state + digest(tensors, go_on=go_on).to_bytes(8, "little")))

    def digests(self) -> dict[str, str]:
        """A digest (hex) of each tensor, and of each object's other values, by dotted name."""
        out = {name: f"{digest([tensor]):016x}" for name, tensor in {**self._fixed(), **self._buffers}.items()}
        for name, obj in self._objects.items():
            tree = obj.tree()
            parts = {f"{name}.{key}": part for key, part in tree.items()} if isinstance(tree, Mapping) else {name: tree}
            for path, part in parts.items():
                out[path] = xxhash.xxh3_64_hexdigest(codec.split(part)[0])
                out |= {leaf: f"{digest([tensor]):016x}" for leaf, tensor in leaves(part, path) if leaf != path}
                if isinstance(part, Tensor):
                    out[path] = f"{digest([part]):016x}"
        return out

    def _tree(self, buffers: Mapping[str, Tensor]) -> dict[str, object]:
        return {
            "kinds": self._kinds,
            "tensors": self._fixed(),
            "buffers": dict(sorted(buffers.items())),
            "objects": {name: obj.tree() for name, obj in self._objects.items()},
        }

    def _fixed(self) -> dict[str, Tensor]:
        """Parameters and protected tensors by name, each once."""
        out: dict[str, Tensor] = {}
        seen: set[int] = set()
        named = [(f"{name}.{key}", p) for name, module in self._modules.items() for key, p in _bare(module).named_parameters()]
        for name, tensor in [*named, *self._tensors.items()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                out[name] = tensor
        return out

    def _all_buffers(self) -> dict[str, Tensor]:
        """Every buffer by the names that it may be adopted under."""
        out: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            for root in (_bare(module), module):
                out |= {f"{name}.{key}": buffer for key, buffer in root.named_buffers(remove_duplicate=False)}
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
