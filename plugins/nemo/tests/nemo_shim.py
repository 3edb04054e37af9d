"""Lets NeMo run on a torch without CUDA, on top of what lets megatron-core do so: pinned memory, ``.to("cuda")``, the tracker's seed.

``before`` goes ahead of the first import of NeMo, ``after`` behind it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "state_replica" / "tests" / "mcore"))

import mcore_shim

_PINNED = ("tensor", "empty", "zeros", "ones", "full", "arange")


def before() -> None:
    """Answer torch.cuda by the CPU, and leave memory unpinned."""
    mcore_shim.before()
    for name in _PINNED:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to = _to_cpu(torch.Tensor.to)


def after() -> None:
    """Answer what Megatron and NeMo keep for themselves."""
    mcore_shim.after()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.collections.llm.peft import lora, module_matcher, utils
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl

    lora.te = SimpleNamespace(Linear=None)  # LoRA compares classes with Transformer Engine's, also where there is none
    for module in (module_matcher, utils):
        for name in [name for name in vars(module) if name.startswith("HAVE_TE")]:
            setattr(module, name, False)  # Megatron has names for its classes without it
    pl._fix_tensors_device = lambda checkpoint: checkpoint  # it would move what was loaded from the wrong GPU
    seed = megatron_init._set_random_seed

    def seeded(number: int) -> None:
        seed(number)
        model_parallel_cuda_manual_seed(number)  # NeMo does so where it counts a GPU

    megatron_init._set_random_seed = seeded


def _unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: object, pin_memory: bool = False, **kwargs: object) -> Any:
        return factory(*args, **kwargs)

    return make


def _to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
        return original(self, *("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args), **kwargs)

    return to
