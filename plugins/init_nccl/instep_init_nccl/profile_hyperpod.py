"""Profile ``hyperpod-1.0.0``: the container that HyperPod checkpointless training 1.0.0 was released with, against what is installed.

The manifest is that of its release notes (December 2025). instep needs none of it: each finding says what a difference means for recovery.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.profiles import Finding, Inspection, Status
from instep_init_nccl import efa
from instep_init_nccl.machine import Machine
from instep_init_nccl.profile_versions import Installed, cuda, nccl, numbers, package, torch_cuda

Verdict = tuple[Status, str, str | None]
"""Status, what it means for recovery, and what to do."""


@dataclass(frozen=True)
class Component:
    """One line of the manifest: where its installed version is told, and what another version means."""

    name: str
    expected: str
    installed: Callable[[Machine], Installed]
    judge: Callable[[str | None], Verdict]


def profile(inspection: Inspection) -> Iterator[Finding]:
    """One finding for each line of the manifest, and those variables that only the closed container reads."""
    machine = Machine(inspection.root, inspection.environ)
    for component in MANIFEST:
        version, source = component.installed(machine)
        status, why, remedy = component.judge(version)
        compared = "as in the manifest" if _same(version, component.expected) else f"the manifest has {component.expected}"
        yield Finding(component.name, f"{version or 'not installed'}; {compared}", source, status, why, remedy)
    yield from foreign(inspection)


def _same(version: str | None, expected: str) -> bool:
    """Whether a version is the expected one, or within it: 12.9.79 is 12.9. A release candidate is itself alone."""
    plain = (version or "").partition("+")[0]
    within = numbers(plain)[: len(numbers(expected))] == numbers(expected)
    return plain == expected or (within and "rc" not in expected + plain)


def torch(version: str | None) -> Verdict:
    """The oldest torch that instep takes is that of the manifest."""
    install = "install a CUDA build of torch 2.6 or later"
    if version is None:
        return "fail", "nothing can be trained without it", install
    if numbers(version) < (2, 6):
        return "fail", "instep needs 2.6: older ones have no abort of a backend", install
    if torch_cuda() is None:
        return "fail", "this build has no CUDA, so no NCCL either; recovery works over gloo only", install
    return "ok", "stock torch is enough: instep changes nothing in it, where the container has a modified one; newer is harmless", None


def cuda_version(version: str | None) -> Verdict:
    """CUDA matters to the driver alone."""
    why = "recovery keeps the CUDA context of survivors and asks nothing of its version; the driver must be new enough for it"
    if version is None:
        return "fail", "without CUDA there is no NCCL; recovery works over gloo only", "install a CUDA build of torch"
    if numbers(version)[:1] != (12,):
        return "warn", f"{why}: another major version needs another driver", "compare nvidia-smi with the CUDA of torch"
    return "ok", f"{why}; within CUDA 12 any difference is harmless", None


def nccl_version(version: str | None) -> Verdict:
    """NCCL decides how communicators are made again, and how those of a lost world end."""
    newer = "install a newer nvidia-nccl, the same on all ranks"
    if version is None:
        return "fail", "no libnccl.so.2 was found; recovery works over gloo only", "install a CUDA build of torch, which brings NCCL"
    parts = numbers(version)
    if parts < (2, 18):
        return "fail", "its communicators cannot be aborted while they are made: a fault in a recovery would hang", newer
    if parts < (2, 23):
        return "warn", "one root for each communicator: before 2.23 NCCL takes no further ones, and that rank is asked by all", newer
    if parts < (2, 27, 5):
        return "ok", "a root a rank works (2.23 and later); otherwise a difference is harmless", None
    revoke = "it can also stop what is in flight before the abort (ncclCommRevoke)" if parts >= (2, 29) else "ends by abort"
    return "ok", f"a root a rank works; {revoke}; all ranks must have the same version, or connecting is refused with both named", None


def fabric(what: str, expected: str) -> Callable[[str | None], Verdict]:
    """Parts of EFA: without them NCCL goes over TCP, and recovers all the same."""

    def judge(version: str | None) -> Verdict:
        if version is None:
            return "warn", f"without {what} NCCL goes over TCP: recovery works as well, steps take longer", "instep check --profile efa"
        if numbers(version) < numbers(expected):
            why = f"older than what the manifest was tested with; recovery rebuilds through NCCL and asks nothing of {what}"
            return "warn", why, f"update it, the same on all machines ({expected} or later)"
        return "ok", f"recovery rebuilds through NCCL and asks nothing of {what}; keep it the same on all machines", None

    return judge


def framework(what: str) -> Callable[[str | None], Verdict]:
    """Frameworks: not needed, whatever their version."""
    why = f"instep does not import {what}; a script that uses it brings its own version, and the manifest's is no condition of recovery"

    def judge(_: str | None) -> Verdict:
        return "ok", why, None

    return judge


MANIFEST = (
    Component("PyTorch", "2.6.0", lambda _: package("torch"), torch),
    Component("CUDA", "12.9", cuda, cuda_version),
    Component("NCCL", "2.27.5", nccl, nccl_version),
    Component("EFA installer", "1.43.0", lambda m: Installed(efa.installer_version(m), efa.PACKAGES), fabric("EFA", "1.43.0")),
    Component(
        "AWS-OFI-NCCL",
        "1.16.0",
        lambda m: Installed(efa.plugin_version(m), str(efa.plugin_library(m) or efa.PACKAGES)),
        fabric("aws-ofi-nccl", "1.16.0"),
    ),
    Component(
        "libfabric",
        "2.1",
        lambda m: Installed(efa.libfabric_version(m), str(efa.libfabric(m) or efa.PACKAGES)),
        fabric("libfabric", "2.1"),
    ),
    Component("Megatron", "0.15.0", lambda _: package("megatron-core"), framework("Megatron")),
    Component("NeMo", "2.6.0rc0", lambda _: package("nemo-toolkit", "nemo_toolkit"), framework("NeMo")),
)

FOREIGN = (
    *("HPCT_USE_ROOTLESS", "HPCT_PORT_BASE", "N_PROC_PER_NODE", "NCCL_SOCKET_RETRY_DELAY"),
    *("TORCH_NCCL_GET_PORT_BASE", "TORCH_GLOO_GET_PORT_BASE", "TORCH_SKIP_TCPSTORE", "HPCT_USE_CONN_DATA"),
)
"""Variables that the modified NCCL, gloo and torch of the container read, and nobody else."""


def foreign(inspection: Inspection) -> Iterator[Finding]:
    """Variables of the closed container that are set here."""
    for name in FOREIGN:
        if name in inspection.environ:
            why = "read by the modified libraries of HyperPod's container only; here it does nothing"
            remedy = "unset it; init_nccl is rootless and storeless by itself"
            yield Finding(name, inspection.environ[name], inspection.sources.get(name, "environment"), "warn", why, remedy)
