"""What the adapter and core say to what they cannot protect, and which groups a lone rank has: one JSON object, printed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mcore_gpt
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

import instep
from instep.errors import UsageError
from instep_state_replica.megatron import Megatron, supported

SETTINGS = {
    "ddp": ("use_megatron_fsdp", "fp8_param_gather", "nccl_ub"),
    "optimizer": ("overlap_param_gather_with_optimizer_step", "use_precision_aware_optimizer", "optimizer_cpu_offload"),
    "config": ("enable_cuda_graph",),
}


@contextmanager
def having(obj: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(obj, name)
    object.__setattr__(obj, name, value)
    try:
        yield
    finally:
        object.__setattr__(obj, name, before)


def says(act: Callable[[], object]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "nothing"


def exchanged(group: Any, inner: torch.optim.Optimizer) -> None:
    """A donor whose optimizer has its first two parameters of one shape in the other order."""
    parameters = inner.param_groups[0]["params"]
    a, b = next((a, b) for b, q in enumerate(parameters) for a, p in enumerate(parameters[:b]) if p.shape == q.shape)
    theirs = group.tree()
    group.fit(theirs)
    parameters[a], parameters[b] = parameters[b], parameters[a]
    group.fit(theirs)


class Orthogonal(torch.optim.Optimizer):
    """Stands for optimizers whose update is no matter of each element alone."""


def main() -> None:
    torch.set_num_threads(1)
    session = instep.init()
    training = mcore_gpt.Training(mcore_gpt.options(["--batch", "2"]), session.rank)
    chunks, optimizer = training.chunks, training.optimizer
    said: dict[str, str] = {}

    def adapt() -> Megatron:
        return Megatron(chunks, optimizer, training.scheduler)

    holders = {"ddp": training.ddp_config, "optimizer": optimizer.chained_optimizers[0].config, "config": training.config}
    for where, names in SETTINGS.items():
        for name in names:
            with having(holders[where], name, True):
                said[name] = says(adapt)
    with having(training.config, "cuda_graph_impl", "local"):
        said["cuda_graph_impl"] = says(adapt)
    for low, high in (((0, 14, 0), (0, 15, 3)), ((0, 17, 0), (0, 18, 0))):
        with having(supported, "RANGE", (low, high)):
            said[f"version {high}"] = says(adapt)
    inner = optimizer.chained_optimizers[0].optimizer
    with having(optimizer.chained_optimizers[0], "optimizer", Orthogonal(inner.param_groups, {})):
        said["inner"] = says(adapt)
    said["bare"] = says(lambda: Megatron(chunks[0].module, optimizer))
    said["none"] = says(lambda: Megatron([], optimizer))
    said["torch"] = says(lambda: Megatron(chunks, inner))
    said["chain"] = says(lambda: Megatron(chunks, type("Muon", (ChainedOptimizer,), {})([])))
    for name, obj in {"model": chunks[0], "optimizer": optimizer, "scheduler": training.scheduler}.items():
        said[f"protect {name}"] = says(lambda name=name, obj=obj: session.protect(**{name: obj}))  # type: ignore[misc]

    adapter = adapt()
    session.protect(training=adapter)
    said["outside"] = says(optimizer.step)
    for group in adapter.groups():
        said[f"group {group.name}"] = str(group.replicas)
    said["order"] = says(lambda: exchanged(adapter.groups()[0], inner))
    print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
