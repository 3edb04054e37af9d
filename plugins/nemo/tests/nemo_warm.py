"""NeMo for a CPU, imported once in the fork server: the imports take longer than a whole test job."""

import importlib
import warnings

import nemo_shim

nemo_shim.before()
warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "nemo.lightning", "nemo.collections.llm", "einops._torch_specific"):
    importlib.import_module(name)
nemo_shim.after()
