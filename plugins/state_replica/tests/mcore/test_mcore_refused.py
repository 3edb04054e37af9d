"""What cannot be recovered is refused at ``protect``, with the reason and what to use instead."""

import json
from pathlib import Path

import pytest
from mcore_harness import SETTINGS

from instep.testing.jobs import Jobs, Script

SCRIPT = str(Path(__file__).with_name("mcore_refusals.py"))
PARTS = {
    "use_megatron_fsdp": "use_distributed_optimizer",
    "fp8_param_gather": "bf16 parameters",
    "nccl_ub": "nccl_ub=False",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather, which",
    "use_precision_aware_optimizer": "use_precision_aware_optimizer=False",
    "optimizer_cpu_offload": "optimizer_cpu_offload=False",
    "enable_cuda_graph": "enable_cuda_graph=False",
    "cuda_graph_impl": "cuda_graph_impl='none'",
    "version (0, 15, 3)": "from 0.14.0 to below 0.15.3, this is 0.16.1",
    "version (0, 18, 0)": "from 0.17.0 to below 0.18.0, this is 0.16.1",
    "inner": "Orthogonal",
    "bare": "needs none: session.protect(model=",
    "none": "no model chunk",
    "torch": "what get_megatron_optimizer() returns",
    "chain": "what get_megatron_optimizer() returns",
    "protect model": "session.protect(training=Megatron(",
    "protect optimizer": "session.protect(training=Megatron(",
    "protect scheduler": "session.protect(training=Megatron(",
    "outside": "outside of a commit",
    "order": "give the optimizer its parameters in one order on all ranks",
    "group megatron.dense-optimizer@0": "(0,)",
    "group megatron.schedule@0": "(0,)",
}


@pytest.fixture(scope="session")
def said(jobs: Jobs) -> dict[str, str]:
    run = jobs.run(Script(SCRIPT, ranks=1, steps=None), settings=SETTINGS)
    lines = [line for line in run.log(0).splitlines() if line.startswith("SAID ")]
    assert lines, run.log(0)[-3000:]
    answers: dict[str, str] = json.loads(lines[0].removeprefix("SAID "))
    return answers


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", PARTS)
def test_said(said: dict[str, str], case: str) -> None:
    assert PARTS[case] in said[case]


def test_nothing_else(said: dict[str, str]) -> None:
    assert set(said) == set(PARTS)
