"""``instep check --profile efa`` on machines that are directories: one of them whole, each other one with one thing wrong."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from efa_machine import FABRIC, GOOD, LIBRARY, build, put, take

from instep.cli.check import main
from instep.plugins import LoadedPlugins
from instep.profiles import Finding, Inspection
from instep_init_nccl import InitNccl
from instep_init_nccl.profile_efa import profile

GIB = 1 << 30


def look(root: Path, *, environ: Mapping[str, str] = GOOD, space: int | None = 64 * GIB, **settings: object) -> dict[str, Finding]:
    plugins = LoadedPlugins({"init_nccl": InitNccl.model_validate({"efa": True, **settings})})
    return {
        finding.what: finding
        for finding in profile(Inspection(environ, dict.fromkeys(environ, "shell"), plugins, root), space=lambda _: space)
    }


def bad(findings: Mapping[str, Finding]) -> dict[str, str]:
    return {finding.what: finding.status for finding in findings.values() if finding.status != "ok"}


def test_nothing_is_wrong_with_a_whole_machine(tmp_path: Path) -> None:
    findings = look(build(tmp_path))
    assert bad(findings) == {}
    assert [finding.what for finding in findings.values() if finding.remedy is not None] == []
    assert all(finding.value and finding.source and finding.why for finding in findings.values())
    assert findings["EFA devices"].value == "4 (rdmap0s0, rdmap1s0, rdmap2s0, rdmap3s0)"
    assert (findings["libfabric"].value, findings["aws-ofi-nccl"].source) == ("2.1.0amzn3.0", LIBRARY)


@pytest.mark.parametrize(
    ("spoil", "what", "status", "part"),
    [
        (lambda root: shutil.rmtree(root / "sys/class/infiniband"), "EFA devices", "fail", "vpc.amazonaws.com/efa"),
        (lambda root: take(root, "/dev/infiniband/uverbs0"), "device files", "fail", "--device=/dev/infiniband"),
        (lambda root: take(root, FABRIC), "libfabric", "fail", "EFA installer"),
        (lambda root: take(root, LIBRARY), "aws-ofi-nccl", "fail", "install aws-ofi-nccl"),
        (lambda root: build(root, memlock="65536"), "memlock", "fail", "ulimit -l unlimited"),
        (lambda root: take(root, "/proc/self/limits"), "memlock", "fail", "ulimit -l unlimited"),
        (lambda root: build(root, nofile="1024"), "nofile", "warn", "ulimit -n 65536"),
        (lambda root: take(root, "/proc/sys/net/ipv4/ip_local_port_range"), "ip_local_port_range", "warn", "readable"),
    ],
)
def test_one_thing_wrong_is_found_and_has_a_remedy(
    spoil: Callable[[Path], object], what: str, status: str, part: str, tmp_path: Path
) -> None:
    spoil(build(tmp_path))
    finding = look(tmp_path)[what]
    assert finding.status == status
    assert part in (finding.remedy or "")


@pytest.mark.parametrize(("space", "status"), [(None, "fail"), (64 << 20, "fail"), (512 << 20, "warn"), (GIB, "ok")])
def test_shared_memory(space: int | None, status: str, tmp_path: Path) -> None:
    finding = look(build(tmp_path), space=space)["shared memory"]
    assert finding.status == status
    assert (finding.remedy is None) == (status == "ok")


@pytest.mark.parametrize(
    ("port", "gpus", "status"), [(None, 8, "ok"), (19_000, 8, "ok"), (19_996, 8, "fail"), (20_000, 0, "fail"), (30_000, 1, "fail")]
)
def test_ports_of_all_ranks_lie_outside_of_the_kernels_range(port: int | None, gpus: int, status: str, tmp_path: Path) -> None:
    build(tmp_path, ports="20000\t65535")
    for number in range(gpus):
        put(tmp_path, f"/dev/nvidia{number}")
    put(tmp_path, "/dev/nvidia-uvm")
    finding = look(tmp_path, port=port)["ip_local_port_range"]
    assert finding.status == status
    assert ("plugins.init_nccl.port" in (finding.remedy or "")) == (status == "fail")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("FI_PROVIDER", None, "warn"),
        ("FI_PROVIDER", "tcp", "fail"),
        ("FI_EFA_FORK_SAFE", None, "warn"),
        ("FI_EFA_USE_HUGE_PAGE", "1", "warn"),
        ("FI_EFA_USE_DEVICE_RDMA", "1", "ok"),
        ("FI_EFA_USE_DEVICE_RDMA", "0", "fail"),
        ("RDMAV_FORK_SAFE", "1", "warn"),
        ("NCCL_NET", "Socket", "fail"),
        ("NCCL_NET", "AWS Libfabric", "ok"),
        ("NCCL_COMM_ID", "10.0.0.1:4000", "fail"),
        ("NCCL_PROTO", "Simple", "warn"),
        ("NCCL_P2P_DISABLE", "1", "warn"),
        ("NCCL_NET_PLUGIN", None, "warn"),
        ("NCCL_NET_PLUGIN", "ofi", "ok"),
        ("NCCL_NET_PLUGIN", "none", "fail"),
        ("NCCL_NET_PLUGIN", "/nowhere/libnccl-net-ofi.so", "fail"),
        ("NCCL_SOCKET_IFNAME", "ens", "ok"),
        ("NCCL_SOCKET_IFNAME", "=ens5", "ok"),
        ("NCCL_SOCKET_IFNAME", "=ens", "fail"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "^lo,ens", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth0", "fail"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "fail"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", None, "fail"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "warn"),
        ("OFI_NCCL_PROTOCOL", "RDMA", "ok"),
    ],
)
def test_variables(name: str, value: str | None, status: str, tmp_path: Path) -> None:
    environ = {key: text for key, text in GOOD.items() if key != name} | ({} if value is None else {name: value})
    findings = look(build(tmp_path), environ=environ)
    assert bad(findings) == ({} if status == "ok" else {name: status})
    assert (findings[name].value, findings[name].source) == (("not set", "nowhere") if value is None else (value, "shell"))
    assert (findings[name].remedy is None) == (status == "ok")


def test_settings_without_efa_are_told(tmp_path: Path) -> None:
    assert bad(look(build(tmp_path), efa=False)) == {"plugin init_nccl": "warn"}
    findings = profile(Inspection(GOOD, root=tmp_path), space=lambda _: 64 * GIB)
    assert [(finding.value, finding.status) for finding in findings if finding.what == "plugin init_nccl"] == [("not enabled", "warn")]


def test_the_command_is_content_with_a_whole_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, home = build(tmp_path / "root"), tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NET_PLUGIN", LIBRARY)
    (home / "instep.toml").write_text("[plugins.init_nccl]\nefa = true\n[plugins.init_nccl.variables]\nFI_EFA_FORK_SAFE = '1'\n")
    assert main(["--profile", "efa", "--json"], root=root) == 0
    report = json.loads(capsys.readouterr().out)
    sources = {finding["what"]: finding["source"] for finding in report["findings"]}
    assert sources["NCCL_NET_PLUGIN"] == "shell"
    assert sources["FI_EFA_FORK_SAFE"] == "instep.toml"
    assert sources["FI_PROVIDER"] == "default of init_nccl"
    take(root, FABRIC)
    assert main(["--profile", "efa"], root=root) == 1
    assert "remedy: install AWS's EFA installer" in capsys.readouterr().out
