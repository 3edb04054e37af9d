"""On a GPU: ``pytest -m gpu`` or ``make test-gpu``. The outcome, or that there is none yet, stands in docs/reference/nccl.md."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from nccl_world import World

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
MEBIBYTE = 1 << 20
Make = Callable[..., World]


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip(f"torch {torch.__version__} is built without NCCL")
    if not torch.cuda.is_available():
        pytest.skip("this machine shows no GPU")


@pytest.fixture
def make_world() -> Iterator[Make]:
    """Makes worlds of real processes and ends them after the test."""
    worlds: list[World] = []

    def make(size: int, **settings: object) -> World:
        version = torch.cuda.nccl.version()
        alone = torch.cuda.device_count() < size
        if alone and version < (2, 30):
            pytest.skip(f"{size} ranks on one GPU need NCCL 2.30, this is {'.'.join(map(str, version))}")
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"} if alone else {}
        worlds.append(World(size, variables=variables, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_right_in_each_incarnation(make_world: Make, size: int) -> None:
    world = make_world(size)
    for _ in range(4):
        world.connect()
        assert world.ask("total", group="world", each=lambda rank: {"value": float(rank + 1)}) == [size * (size + 1) / 2] * size


@pytest.mark.parametrize("revoke", [True, False])
def test_a_collective_that_a_rank_never_enters_is_aborted(make_world: Make, revoke: bool) -> None:
    world = make_world(2, revoke=revoke)
    world.connect()
    world.ask("total", group="world", value=1.0)
    world.ask("get_stuck", [0], group="world")
    assert world.ask("outcome", [0], seconds=1.0) == [[False, "stuck"]]
    world.connect()
    assert world.ask("outcome", [0], seconds=10.0)[0][0]
    assert world.ask("total", group="world", value=2.0) == [4.0, 4.0]


@pytest.mark.parametrize("size", [1, 2])
def test_fifty_incarnations_leave_nothing_behind(make_world: Make, size: int) -> None:
    world = make_world(size)

    def turns(count: int) -> tuple[list[list[int]], list[dict[str, int]]]:
        for _ in range(count):
            world.connect()
            world.ask("total", group="world", value=1.0)
        return world.ask("holdings"), world.ask("memory")

    (held, memory), (held_then, memory_then) = turns(10), turns(50)
    for before, after in zip(held, held_then, strict=True):
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 2
    for first, last in zip(memory, memory_then, strict=True):
        assert first["device_free"] - last["device_free"] < 64 * MEBIBYTE
        assert last["resident"] - first["resident"] < 64 * MEBIBYTE


def test_a_ddp_job_is_bitwise_equal_after_a_recovery() -> None:
    """Backward passes before and after, on a plain group whose backend was swapped; one rank, so the fault is an exception."""
    words = [sys.executable, "-m", "instep", "drill", "--backend", "nccl", "--ranks", "1", "--steps", "20", "--raise", "0@7", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["ok"]
    assert verdict["bitwise_equal"]
    assert len(verdict["incidents"]) == 1
