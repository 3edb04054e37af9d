"""Megatron for a CPU, imported once in the fork server: the imports take longer than a whole test job."""

import importlib
import warnings

import mcore_shim

_MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.rerun_state_machine",
    "einops._torch_specific",
    "instep_state_replica.megatron",
)

mcore_shim.before()
warnings.simplefilter("ignore")
for name in _MODULES:
    importlib.import_module(name)
mcore_shim.after()
