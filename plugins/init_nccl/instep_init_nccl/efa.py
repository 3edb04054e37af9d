"""EFA on this machine: its devices, libfabric, and the plugin that brings NCCL to it. What is named but absent is an error that says so."""

import re
from dataclasses import dataclass
from pathlib import Path

from instep.errors import ConfigError
from instep_init_nccl.machine import Machine

AMAZON = "0x1d0f"
DEVICES, FILES = "/sys/class/infiniband", "/dev/infiniband"
PACKAGES = "/opt/amazon/efa_installed_packages"
LIBFABRIC = (
    *("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib", "/opt/amazon/efa/lib/x86_64-linux-gnu"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib"),
)
PLUGIN = (
    *("/opt/amazon/ofi-nccl/lib64", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"),
    *("/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu", "/opt/aws-ofi-nccl/lib", "/opt/aws-ofi-nccl/install/lib"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib"),
)
HOW_DEVICES = (
    "start an instance type with EFA and an EFA interface attached; in Kubernetes request vpc.amazonaws.com/efa, in a container pass "
    "--device=/dev/infiniband; without EFA set plugins.init_nccl.efa = false"
)
HOW_LIBFABRIC = "install AWS's EFA installer (in an image: efa_installer.sh -y --skip-kmod), or put its folder on LD_LIBRARY_PATH"
HOW_PLUGIN = "install aws-ofi-nccl (the EFA installer brings it), or set NCCL_NET_PLUGIN to the path of its library"


@dataclass(frozen=True)
class Absent:
    """Something that EFA needs and that is not there: what, where it was looked for, and what to do."""

    what: str
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} (looked in {self.where}): {self.remedy}"


def devices(machine: Machine) -> list[str]:
    """Names of the EFA devices. Other RDMA devices in the same place are passed over."""
    return [name for name in machine.names(DEVICES) if machine.text(f"{DEVICES}/{name}/device/vendor") in {AMAZON, None}]


def device_files(machine: Machine) -> list[str]:
    """The device files through which user space reaches RDMA devices."""
    return machine.names(FILES, "uverbs*")


def libfabric(machine: Machine) -> Path | None:
    """The library that would be loaded."""
    return machine.first(LIBFABRIC, "libfabric.so.1", "libfabric.so")


def libfabric_version(machine: Machine) -> str | None:
    """Its version, as its package tells it."""
    library = libfabric(machine)
    folders = [str(library.parent)] if library else []
    for folder in (*folders, *LIBFABRIC):
        told = machine.text(f"{folder}/pkgconfig/libfabric.pc") or ""
        if match := re.search(r"^Version:\s*(\S+)", told, re.MULTILINE):
            return match[1]
    return package(machine, "libfabric-aws", "libfabric1-aws", "libfabric")


def plugin_library(machine: Machine) -> Path | None:
    """The library of aws-ofi-nccl that would be loaded."""
    named = machine.environ.get("NCCL_NET_PLUGIN", "")
    if named.startswith("/") and machine.exists(named):
        return Path(named)
    return machine.first(PLUGIN, "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so", "libnccl-net.so")


def plugin_version(machine: Machine) -> str | None:
    """Its version: a string in the library itself, else what its package tells."""
    library = plugin_library(machine)
    inside = machine.found_in(library, rb"aws-ofi-nccl (\d[\w.]*)") if library else None
    return inside or package(machine, "libnccl-ofi-ngc", "libnccl-ofi")


def installer_version(machine: Machine) -> str | None:
    """The version of the EFA installer that was run."""
    match = re.search(r"EFA installer version:\s*(\S+)", machine.text(PACKAGES) or "")
    return match[1] if match else None


def package(machine: Machine, *names: str) -> str | None:
    """The version of the first of some packages in the list that the EFA installer left (``libnccl-ofi_1.16.0-1_amd64``, ``name-1.2``)."""
    listed = machine.text(PACKAGES) or ""
    for name in names:
        if match := re.search(rf"(?<![\w-]){re.escape(name)}[_-](\d+(?:\.\d+)*)", listed):
            return match[1]
    return None


def absent(machine: Machine) -> list[Absent]:
    """What EFA needs and is not there."""
    out = []
    found, files = devices(machine), device_files(machine)
    if not found:
        out.append(Absent("there is no EFA device", DEVICES, HOW_DEVICES))
    elif len(files) < len(found):
        out.append(Absent(f"{len(files)} device files for {len(found)} EFA devices", f"{FILES}/uverbs*", HOW_DEVICES))
    elif unusable := [name for name in files if not machine.usable(f"{FILES}/{name}")]:
        out.append(Absent(f"{', '.join(unusable)} cannot be opened for reading and writing", FILES, "let this user read and write them"))
    if libfabric(machine) is None:
        out.append(Absent("libfabric is not installed", "LD_LIBRARY_PATH, /opt/amazon/efa and the system's folders", HOW_LIBFABRIC))
    if plugin_library(machine) is None:
        where = "NCCL_NET_PLUGIN, LD_LIBRARY_PATH, /opt/amazon/ofi-nccl and the system's folders"
        out.append(Absent("NCCL's network plugin aws-ofi-nccl is not installed", where, HOW_PLUGIN))
    return out


def require(rank: int, machine: Machine) -> None:
    """Make sure that EFA is there, on a rank whose settings name it.

    Raises:
        ConfigError: something is absent; the message names the rank, and the remedy for each thing.
    """
    if lacking := absent(machine):
        lines = "\n".join(f"  {thing}" for thing in lacking)
        raise ConfigError(f"init_nccl: rank {rank}: the settings name EFA (efa = true), which is not all there:\n{lines}")
