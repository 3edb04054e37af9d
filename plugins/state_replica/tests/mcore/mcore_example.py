"""Runs a script of the examples as it is, on a CPU: ``mcore_example.py SCRIPT``."""

import runpy
import sys

import mcore_warm  # noqa: F401 - first: it makes Megatron importable without CUDA

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
