"""Profile ``efa``: whether this machine, its libraries and its limits carry a job with NCCL over EFA, and what to do where they do not."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from instep.profiles import Finding, Inspection, Status
from instep_init_nccl import efa
from instep_init_nccl.machine import Machine, disk_space
from instep_init_nccl.profile_variables import variables

NAME = "init_nccl"
PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
FILES_WANTED = 65_536
SHARED_LEAST, SHARED_WANTED = 64 << 20, 1 << 30
_INSTALLER = "EFA's installer"


def profile(inspection: Inspection, *, space: Callable[[Path], int | None] = disk_space) -> Iterator[Finding]:
    """All findings. ``space`` tells the bytes of the file system at a path."""
    machine = Machine(inspection.root, inspection.environ, space)
    yield from settings(inspection)
    yield from hardware(machine)
    yield from libraries(machine)
    yield from limits(machine)
    yield from ports(machine, inspection)
    yield from variables(inspection)


def settings(inspection: Inspection) -> Iterator[Finding]:
    """Whether the configuration names EFA."""
    plugin = inspection.plugins.get(NAME)
    why = "with it the plugin exports the variables below, and a rank without EFA ends at its start with the reason"
    on = bool(plugin is not None and plugin.model_dump().get("efa"))
    value = "not enabled" if plugin is None else f"efa = {str(on).lower()}"
    remedy = None if on else "in the configuration: [plugins.init_nccl] efa = true"
    yield Finding(f"plugin {NAME}", value, "configuration", "ok" if on else "warn", why, remedy)


def hardware(machine: Machine) -> Iterator[Finding]:
    """Devices and the files through which they are reached."""
    found, files = efa.devices(machine), efa.device_files(machine)
    why = "one for each network card; user space reaches them without the kernel"
    yield _finding("EFA devices", _some(found), efa.DEVICES, why, efa.HOW_DEVICES, ok=bool(found))
    unusable = [name for name in files if not machine.usable(f"{efa.FILES}/{name}")]
    fits = bool(files) and len(files) >= len(found) and not unusable
    value = f"{_some(files)}{f'; not for this user: {_some(unusable)}' if unusable else ''}"
    remedy = "let this user read and write them" if unusable else efa.HOW_DEVICES
    yield _finding("device files", value, f"{efa.FILES}/uverbs*", "libfabric opens one for each device", remedy, ok=fits)
    driver = machine.text("/sys/module/efa/version")
    if found:
        yield Finding(
            "kernel driver efa", driver or "built in, version unknown", "/sys/module/efa", "ok", "must not be older than libfabric"
        )


def libraries(machine: Machine) -> Iterator[Finding]:
    """libfabric, and NCCL's plugin for it."""
    library, version = efa.libfabric(machine), efa.libfabric_version(machine)
    where = str(library or "LD_LIBRARY_PATH, /opt/amazon/efa, the system's folders")
    why = "carries NCCL's data over EFA"
    yield _finding("libfabric", _version(library, version), where, why, efa.HOW_LIBFABRIC, ok=library is not None)
    library, version = efa.plugin_library(machine), efa.plugin_version(machine)
    where = str(library or "NCCL_NET_PLUGIN, LD_LIBRARY_PATH, /opt/amazon/ofi-nccl, the system's folders")
    why = "NCCL's network plugin: without it NCCL goes over TCP"
    yield _finding("aws-ofi-nccl", _version(library, version), where, why, efa.HOW_PLUGIN, ok=library is not None)
    installer = efa.installer_version(machine)
    why = "brings driver, libfabric and plugin that fit together; equal on all machines of a job"
    yield Finding(_INSTALLER, installer or "not recorded", efa.PACKAGES, "ok", why)


def limits(machine: Machine) -> Iterator[Finding]:
    """What a process may lock and open, and the room in shared memory."""
    source = "/proc/self/limits"
    locked, files = machine.limit("Max locked memory"), machine.limit("Max open files")
    value = "unknown" if locked.unknown else "unlimited" if locked.soft is None else f"{locked.soft:,} bytes"
    why = "every buffer that EFA sends from is locked; a limit makes registration fail in the middle of a run"
    remedy = "ulimit -l unlimited (/etc/security/limits.conf; docker --ulimit memlock=-1; Slurm PropagateResourceLimits)"
    yield _finding("memlock", value, source, why, remedy, ok=not locked.unknown and locked.soft is None)
    value = "unknown" if files.unknown else "unlimited" if files.soft is None else f"{files.soft:,}"
    enough = not files.unknown and (files.soft is None or files.soft >= FILES_WANTED)
    why = "a rank holds descriptors for each peer, device and loader; during a recovery for old and new communicators"
    remedy = f"ulimit -n {FILES_WANTED} or more (docker --ulimit nofile={FILES_WANTED}:{FILES_WANTED})"
    yield _finding("nofile", value, source, why, remedy, ok=enough, otherwise="warn")
    size = machine.size("/dev/shm")  # noqa: S108 - the folder itself is asked about
    value = "not there" if size is None else f"{size / 2**20:,.0f} MiB"
    status: Status = "fail" if size is None or size <= SHARED_LEAST else "warn" if size < SHARED_WANTED else "ok"
    why = "NCCL moves data between the GPUs of a machine through it, and loaders keep their batches there; docker gives 64 MiB"
    more = "docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    yield Finding("shared memory", value, "the file system at /dev/shm", status, why, None if status == "ok" else more)


def ports(machine: Machine, inspection: Inspection) -> Iterator[Finding]:
    """Ports that ranks listen on, against those that the kernel gives to any connection."""
    plugin, told = inspection.plugins.get(NAME), machine.text(PORTS)
    base = plugin.model_dump().get("port") if isinstance(plugin, BaseModel) else None
    why = "the kernel takes ports of outgoing connections from this range; a fixed port inside may be taken when its rank comes back"
    if told is None:
        yield Finding("ip_local_port_range", "unknown", PORTS, "warn", why, "make /proc/sys readable in the container")
        return
    low, high = (int(part) for part in told.split())
    if not isinstance(base, int):
        yield Finding("ip_local_port_range", f"{low}-{high}", PORTS, "ok", f"{why}; init_nccl has no fixed port, ranks announce theirs")
        return
    ranks = max(1, len([name for name in machine.names("/dev", "nvidia*") if name.removeprefix("nvidia").isdecimal()]))
    value = f"ports {base}-{base + ranks - 1}, range {low}-{high}"
    apart = base + ranks - 1 < low or base > high
    remedy = f"choose plugins.init_nccl.port outside of {low}-{high}, or move the range (sysctl net.ipv4.ip_local_port_range)"
    yield _finding("ip_local_port_range", value, PORTS, why, remedy, ok=apart)


def _finding(what: str, value: str, source: str, why: str, remedy: str, *, ok: bool, otherwise: Status = "fail") -> Finding:
    return Finding(what, value, source, "ok" if ok else otherwise, why, None if ok else remedy)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} ({shown})" if names else "none"


def _version(library: Path | None, version: str | None) -> str:
    return "not found" if library is None else version or "version unknown"
