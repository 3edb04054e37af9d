"""A machine with EFA as a directory tree, of which each test spoils one thing."""

from collections.abc import Mapping
from pathlib import Path

PACKAGES = """# EFA installer version: 1.43.0
# Debug packages installed: no
# Packages installed:
efa-config_1.18_all libfabric1-aws_2.1.0amzn3.0_amd64 libnccl-ofi_1.16.0-1_amd64
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {nofile:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes
"""
LIBRARY = "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
FABRIC = "/opt/amazon/efa/lib/libfabric.so.1"
GOOD = {
    "FI_PROVIDER": "efa",
    "FI_EFA_FORK_SAFE": "1",
    "FI_EFA_USE_HUGE_PAGE": "0",
    "NCCL_NET_PLUGIN": LIBRARY,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""An environment with which nothing is wrong."""


def build(root: Path, *, devices: int = 4, memlock: str = "unlimited", nofile: str = "1048576", ports: str = "20000 65535") -> Path:
    """Write the tree below ``root``, and give it back."""
    for number in range(devices):
        put(root, f"/sys/class/infiniband/rdmap{number}s0/device/vendor", "0x1d0f\n")
        put(root, f"/dev/infiniband/uverbs{number}")
    files: Mapping[str, str] = {
        "/sys/module/efa/version": "2.17.2g\n",
        "/sys/class/net/lo/mtu": "65536",
        "/sys/class/net/ens5/mtu": "9001",
        "/proc/self/limits": LIMITS.format(memlock=memlock, nofile=nofile),
        "/proc/sys/net/ipv4/ip_local_port_range": ports,
        "/opt/amazon/efa_installed_packages": PACKAGES,
        FABRIC: "",
        "/opt/amazon/efa/lib/pkgconfig/libfabric.pc": "Name: libfabric\nVersion: 2.1.0amzn3.0\n",
        LIBRARY: "\0NET/OFI Initializing aws-ofi-nccl 1.16.0\0",
        "/dev/shm/none": "",
    }
    for path, text in files.items():
        put(root, path, text)
    return root


def put(root: Path, path: str, text: str = "") -> None:
    """Write one file of the tree."""
    real = root / path.lstrip("/")
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_text(text)


def take(root: Path, path: str) -> None:
    """Take one file away."""
    (root / path.lstrip("/")).unlink()
