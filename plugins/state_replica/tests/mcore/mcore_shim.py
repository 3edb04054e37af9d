"""Lets megatron-core run on a torch without CUDA: each of its assumptions that a tiny model meets, answered by the CPU.

Nothing here touches collectives: gloo serves them as they are. ``before`` goes ahead of the first import of Megatron, ``after`` behind it.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like", "full_like", "as_tensor")


class _Nothing:
    """A stream or an event: on a CPU everything is in order anyway."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def before() -> None:
    """Answer torch.cuda by the CPU."""
    torch._dynamo.config.disable = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.type = _cuda_type(torch.Tensor.type)


def after() -> None:
    """Answer what Megatron keeps for itself."""
    import megatron.core.tensor_parallel.random as rng
    from megatron.core.transformer.moe import moe_utils

    # The setter queues its work until CUDA is there, which is never.
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # It warns when the CPU's generator moves inside fork(): here it is the device's.
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: object, **kwargs: object) -> Any:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def named(self: torch.Tensor, dtype: Any = None, *args: object, **kwargs: object) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return str(original(self)).replace("torch.", "torch.cuda.", 1)

    return named
