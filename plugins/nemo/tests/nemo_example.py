"""Runs a script of the examples as it is, on a CPU: ``nemo_example.py SCRIPT ARGS``."""

import runpy
import sys

import nemo_warm  # noqa: F401 - first: it makes NeMo importable without CUDA
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
