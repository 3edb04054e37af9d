"""DistributedDataParallel: what cannot be supported is refused, and gradient buckets are the same on every rank after a fault.

The order of a floating point sum depends on how gradients are packed into buckets. DDP repacks them once, from the order in which
the first backward finished; a replacement has no such history. So in every recovery one donor tells its layout and every rank, the
donor included, installs it: the reducer is made to rebuild its buckets, and the two broadcasts in which it would follow rank 0
are answered with the layout.
"""

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from instep.errors import InstepError, UsageError
from instep.torch import routing

Layout = list[list[int]]
"""For each bucket, in the order of reduction, the numbers of its parameters."""


class Script(Protocol):
    """What ``scripted`` returns: a context in which broadcasts are answered."""

    def __enter__(self) -> object: ...
    def __exit__(self, *args: object) -> bool | None: ...


@runtime_checkable
class Scripted(Protocol):
    """A process group that can answer broadcasts with given results, without its peers."""

    def scripted(self, results: Sequence[Sequence[Tensor]], /) -> Script:
        """Answer the next broadcasts with ``results``; everything else loops back."""


class _Private(Protocol):
    """The private methods of DDP and its reducer that are used here, with their types."""

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]: ...
    def _get_ddp_logging_data(self) -> dict[str, object]: ...


class Census:
    """Finds every ``DistributedDataParallel`` that is built after ``start``, also those that the script never protects."""

    def __init__(self) -> None:
        self._built: list[weakref.ref[DistributedDataParallel]] = []
        self._hook: RemovableHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._hook = self._hook or register_module_module_registration_hook(self._note)

    def stop(self) -> None:
        """Watch no longer; what was found is kept."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def living(self) -> list[DistributedDataParallel]:
        """Those that still exist, oldest first."""
        return [ddp for ref in self._built if (ddp := ref()) is not None]

    def _note(self, module: nn.Module, name: str, _: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel) and module not in self.living():
            self._built.append(weakref.ref(module))


def compiled(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP inside of ``torch.compile(ddp)``, if ``module`` is that."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) else None


def check(module: nn.Module, name: str) -> None:
    """Refuse what a recovery could not bring back bit for bit.

    Raises:
        UsageError: ``module`` is a DDP with a static graph, a communication hook, a delayed or fused reduction, or it is compiled.
    """
    whole = compiled(module)
    if whole is not None or (isinstance(module, DistributedDataParallel) and module._compiled_call_impl is not None):
        raise UsageError(
            f"{name}: torch.compile around DistributedDataParallel splits the graph along its gradient buckets, which a recovery sets; "
            "compile the inner module instead: DistributedDataParallel(torch.compile(model))"
        )
    if not isinstance(module, DistributedDataParallel):
        return
    if module.static_graph:
        raise UsageError(
            f"{name}: static_graph=True keeps a record of the first iteration that a replacement cannot get; leave it out "
            "(find_unused_parameters=True serves graphs that change)"
        )
    hook = cast(_Private, module)._get_ddp_logging_data().get("comm_hook")
    if module._comm_hooks or hook:
        raise UsageError(
            f"{name}: a DDP communication hook ({hook or 'mixed_precision'}) may keep state between steps that no rank could restore; "
            "leave the hook out and cast under torch.autocast, or compress by hand between backward and commit"
        )
    if module._use_python_reducer or module._delay_all_reduce_params:
        what = "optimize_ddp='python_reducer'" if module._use_python_reducer else "delay_all_reduce_named_params"
        raise UsageError(f"{name}: {what} reduces gradients outside of DDP's reducer, which a recovery cannot reset; leave it out")


@dataclass(frozen=True)
class _Mark:
    """What DDP had done by a commit: ``reduced`` gradients at least once; whether the next forward broadcasts buffers."""

    reduced: bool
    forward_sync: bool


class Reducer:
    """The gradient reducer of one DDP, as of the last commit."""

    def __init__(self, ddp: DistributedDataParallel, name: str) -> None:
        self.ddp, self.name = ddp, name
        self._parameters, self._sparse = cast(_Private, ddp)._build_params_for_reducer()
        self._layout: Layout | None = None
        self._synced = bool(ddp._has_rebuilt_buckets) or self._has_gradients()
        self._mark = self._pending = _Mark(self._synced, bool(ddp.require_forward_param_sync))
        self._hook: RemovableHandle | None = None
        self._watch(on=not self._synced)

    def prepare(self) -> None:
        """At a commit's entry, or earlier if gradients will be gone by then: note what this step has done."""
        reduced = self._pending.reduced or bool(self.ddp._has_rebuilt_buckets) or (self._synced and self._has_gradients())
        self._pending = _Mark(reduced, bool(self.ddp.require_forward_param_sync))

    def commit(self) -> None:
        """The step that was prepared is committed."""
        self._mark = self._pending
        if self._mark.reduced:
            self._watch(on=False)

    @property
    def settled(self) -> bool:
        """Whether the layout of the next step is known; until DDP has agreed on its buckets, ``describe`` would get ahead of that."""
        return bool(self.ddp._has_rebuilt_buckets) or self._layout is not None or not self._mark.reduced or not self._rebuilds()

    def describe(self) -> list[object]:
        """Donor: the layout at the last commit (``None``: the one DDP begins with), and whether the next forward syncs buffers."""
        return [self.layout(), self._mark.forward_sync]

    def layout(self) -> Layout | None:
        """The layout with which the step after the last commit reduces, ``None`` for the one that DDP begins with."""
        if not self._mark.reduced or not self._rebuilds():
            return None
        if self._layout is None:
            ddp = self.ddp
            with self._group().scripted([]):
                # Rebuilt at the next forward of the healthy run; a fault may have come before it.
                rebuilt = bool(ddp._has_rebuilt_buckets) or ddp.reducer._rebuild_buckets()
            present = self._present()
            if not rebuilt and present == self._first():
                return None
            ddp._has_rebuilt_buckets = True
            self._layout = present
        return self._layout

    def apply(self, description: object) -> None:
        """Every rank: install what a donor described; unfinished work of the reducer is dropped.

        Raises:
            UsageError: the layout belongs to another model.
        """
        layout, forward_sync = self._parse(description)
        ddp = self.ddp
        ddp.reducer._reset_state()
        if self._rebuilds():
            self._install(self._first() if layout is None else layout)
            if layout is None:
                ddp.reducer._reset_state()
        ddp._has_rebuilt_buckets = layout is not None
        ddp.require_backward_grad_sync = True
        ddp.require_forward_param_sync = forward_sync
        self._layout = layout
        self._synced = False
        self._mark = self._pending = _Mark(layout is not None, forward_sync)
        self._watch(on=layout is None)

    def _install(self, layout: Layout) -> None:
        reducer = self.ddp.reducer
        numbers = torch.tensor([*(i for bucket in layout for i in bucket), len(layout)], dtype=torch.int32)
        sizes = torch.tensor([len(bucket) for bucket in layout], dtype=torch.int32)
        with self._group().scripted([[numbers], [sizes]]):
            reducer._push_all_rebuilt_params()
            rebuilt = reducer._rebuild_buckets()
        if not rebuilt:
            raise InstepError(f"{self.name}: the reducer of this version of torch did not take over a layout of gradient buckets")

    def _parse(self, description: object) -> tuple[Layout | None, bool]:
        if isinstance(description, list) and len(description) == 2 and isinstance(description[1], bool):
            layout, forward_sync = description
            if layout is None:
                return None, forward_sync
            if sorted(i for bucket in layout for i in bucket) == list(range(len(self._parameters))):
                return layout, forward_sync
        raise UsageError(
            f"{self.name}: the donor's gradient buckets do not fit this rank's {len(self._parameters)} parameters that require gradients; "
            "all ranks must freeze the same parameters"
        )

    def _present(self) -> Layout:
        number = {id(p): i for i, p in enumerate(self._parameters)}
        buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        try:
            return [[number[id(p)] for p in bucket.parameters()] for bucket in buckets]
        except KeyError:
            raise UsageError(
                f"{self.name}: requires_grad of parameters changed after DistributedDataParallel was built; freeze them before it is"
            ) from None

    def _first(self) -> Layout:
        """What ``DistributedDataParallel.__init__`` begins with."""
        config = getattr(self.ddp, "_bucket_config", None)
        limits = [sys.maxsize]
        if config is not None:
            limits, _ = config.compute_bucket_size_limits(static_graph=False, find_unused_parameters=False)
        buckets, _ = c10d._compute_bucket_assignment_by_size(self._parameters, limits, self._sparse)
        return list(reversed(buckets))

    def _rebuilds(self) -> bool:
        return not self.ddp.find_unused_parameters and isinstance(self._group(), Scripted)

    def _group(self) -> Scripted:
        return cast(Scripted, routing.handle_of(self.ddp.process_group))

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._parameters)

    def _watch(self, *, on: bool) -> None:
        if self._hook is not None and not on:
            self._hook.remove()
            self._hook = None
        elif self._hook is None and on:
            self._hook = self.ddp.register_forward_pre_hook(self._forward)

    def _forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and self.ddp.require_backward_grad_sync:
            self._synced = True
