"""EFA that the settings name must be there; what workers are given can be set, and each value has its reason."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from efa_machine import FABRIC, LIBRARY, build, put, take

from instep.agent.agent import Launch, run
from instep.config import Config
from instep.errors import ConfigError
from instep.hooks import Job
from instep_init_nccl import InitNccl, efa
from instep_init_nccl.exports import EFA, ROOTS, WATCHDOG, environment, exports
from instep_init_nccl.machine import Machine

JOB = Job(rank=3, world_size=8, local_rank=3, birth=0, host="127.0.0.1", secret=b"x" * 32)


def told(machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        efa.require(3, machine)
    return str(caught.value)


def test_a_whole_machine_is_enough(tmp_path: Path) -> None:
    machine = Machine(build(tmp_path))
    efa.require(3, machine)
    assert (efa.installer_version(machine), efa.libfabric_version(machine), efa.plugin_version(machine)) == (
        "1.43.0",
        "2.1.0amzn3.0",
        "1.16.0",
    )
    assert str(efa.plugin_library(machine)) == LIBRARY


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda root: shutil.rmtree(root / "sys/class/infiniband"), ["no EFA device", "/sys/class/infiniband", "vpc.amazonaws.com/efa"]),
        (lambda root: take(root, "/dev/infiniband/uverbs2"), ["3 device files for 4 EFA devices", "--device=/dev/infiniband"]),
        (lambda root: take(root, FABRIC), ["libfabric is not installed", "EFA installer", "LD_LIBRARY_PATH"]),
        (lambda root: take(root, LIBRARY), ["aws-ofi-nccl is not installed", "NCCL_NET_PLUGIN"]),
    ],
)
def test_what_is_absent_is_told_with_the_rank_and_the_remedy(spoil: Callable[[Path], None], parts: list[str], tmp_path: Path) -> None:
    spoil(build(tmp_path))
    message = told(Machine(tmp_path))
    assert "rank 3" in message
    assert "efa = true" in message
    assert [part for part in parts if part not in message] == []
    assert len(message.splitlines()) == 2, "one line for the one thing that is absent"


def test_all_that_is_absent_is_told_at_once(tmp_path: Path) -> None:
    lines = told(Machine(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["there", "libfabric", "NCCL's"]
    assert "plugins.init_nccl.efa = false" in lines[1]


@pytest.mark.skipif(bool(efa.devices(Machine())), reason="this machine has EFA")
def test_a_rank_without_efa_does_not_start() -> None:
    with pytest.raises(ConfigError, match="rank 3: the settings name EFA"):
        InitNccl(efa=True).start(JOB)
    InitNccl().start(JOB)


def test_rdma_of_somebody_else_is_not_efa(tmp_path: Path) -> None:
    build(tmp_path, devices=0)
    put(tmp_path, "/sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
    assert "no EFA device" in told(Machine(tmp_path))


def test_a_library_on_the_search_path_comes_first(tmp_path: Path) -> None:
    build(tmp_path)
    put(tmp_path, "/own/lib/libnccl-net.so", "\0aws-ofi-nccl 1.19.2\0")
    machine = Machine(tmp_path, {"LD_LIBRARY_PATH": "/nowhere:/own/lib"})
    assert (str(efa.plugin_library(machine)), efa.plugin_version(machine)) == ("/own/lib/libnccl-net.so", "1.19.2")
    take(tmp_path, "/own/lib/libnccl-net.so")
    assert str(efa.plugin_library(machine)) == LIBRARY


def test_versions_come_from_the_packages_where_files_do_not_tell(tmp_path: Path) -> None:
    build(tmp_path)
    take(tmp_path, "/opt/amazon/efa/lib/pkgconfig/libfabric.pc")
    put(tmp_path, LIBRARY, "no version in here")
    machine = Machine(tmp_path)
    assert (efa.libfabric_version(machine), efa.plugin_version(machine)) == ("2.1.0", "1.16.0")


def test_workers_are_given_what_each_library_reads(tmp_path: Path) -> None:
    machine = Machine(build(tmp_path))
    plain, fast = environment(efa=False, variables={}, machine=machine), environment(efa=True, variables={}, machine=machine)
    assert set(plain) == {export.name for export in (*ROOTS, *WATCHDOG)}
    assert set(fast) - set(plain) == {*(export.name for export in EFA), "NCCL_NET_PLUGIN"}
    assert fast["NCCL_NET_PLUGIN"] == LIBRARY
    assert environment(efa=True, variables={}, machine=Machine(tmp_path / "bare"))["NCCL_NET_PLUGIN"] == "ofi"
    assert all(export.why for export in exports(efa=True, machine=machine))


def test_the_configuration_is_above_the_plugin(tmp_path: Path) -> None:
    chosen = {"FI_EFA_USE_HUGE_PAGE": "1", "NCCL_DEBUG": "INFO"}
    given = environment(efa=True, variables=chosen, machine=Machine(tmp_path))
    assert given | chosen == given
    assert InitNccl(variables={"NCCL_DEBUG": "WARN"}).environment()["NCCL_DEBUG"] == "WARN"


def test_a_variable_in_small_letters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[plugins.init_nccl.variables\] 'nccl_debug': names are upper case"):
        environment(efa=False, variables={"nccl_debug": "INFO"}, machine=Machine(tmp_path))


@pytest.mark.skipif(bool(efa.devices(Machine())), reason="this machine has EFA")
def test_a_job_ends_at_its_start_with_the_rank_and_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import instep\ninstep.init()\n")
    settings = Config.model_validate({"plugins": {"init_nccl": {"efa": True}}})
    outcome = run(Launch(str(script), config=settings, preload=False, quiet=True))
    assert outcome.code == 2
    for part in ("rank 0: the settings name EFA (efa = true)", "vpc.amazonaws.com/efa", "plugins.init_nccl.efa = false"):
        assert part in outcome.message
