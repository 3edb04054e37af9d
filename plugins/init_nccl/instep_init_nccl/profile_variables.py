"""The variables that torch, NCCL, libfabric and aws-ofi-nccl read, held against what a job with EFA and recovery needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.profiles import Finding, Inspection, Status
from instep_init_nccl.exports import exports
from instep_init_nccl.machine import Machine

_PREFIXES = ("FI_", "NCCL_", "OFI_NCCL_", "RDMAV_", "TORCH_NCCL_")
_UNSET = "not set"


@dataclass(frozen=True)
class Rule:
    """One variable: the values that are right, what it means that it is unset or set to another, and what to do then.

    ``unset`` is ``None`` where nothing needs to be said of a variable that is not set.
    """

    name: str
    good: Callable[[str], bool]
    unset: Status | None
    bad: Status
    why: str
    remedy: str


def _never(_: str) -> bool:
    return False


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


_EXPORTED = "leave it to init_nccl (efa = true exports it), or set it to {}"
RULES = (
    Rule(
        "FI_PROVIDER", _is("efa"), unset="warn", bad="fail",
        why="libfabric's provider; without it libfabric takes the first that works, which may be TCP",
        remedy=_EXPORTED.format("efa"),
    ),
    Rule(
        "FI_EFA_FORK_SAFE", _is("1"), unset="warn", bad="warn",
        why="loaders fork while the device is in use; kernels before 5.15 then corrupt registered memory without it",
        remedy=_EXPORTED.format("1"),
    ),
    Rule(
        "FI_EFA_USE_HUGE_PAGE", _is("0"), unset="warn", bad="warn",
        why="buffers in huge pages make the fork of a loader fail with 'Cannot allocate memory'",
        remedy=_EXPORTED.format("0"),
    ),
    Rule(
        "FI_EFA_USE_DEVICE_RDMA", _is("1"), unset=None, bad="fail",
        why="0 takes RDMA away from EFA; newer versions use it where the device has it, p4d needed 1",
        remedy="unset it, or set it to 1",
    ),
    Rule(
        "RDMAV_FORK_SAFE", _never, unset=None, bad="warn",
        why="the older switch below libfabric; beside FI_EFA_FORK_SAFE it does harm on newer kernels",
        remedy="unset it; FI_EFA_FORK_SAFE=1 is enough",
    ),
    Rule(
        "NCCL_NET", lambda value: "libfabric" in value.lower(), unset=None, bad="fail",
        why="forces one network of NCCL by name; another one than the plugin's means that EFA is not used",
        remedy="unset it; NCCL takes the plugin that NCCL_NET_PLUGIN names",
    ),
    Rule(
        "NCCL_COMM_ID", _never, unset=None, bad="fail",
        why="gives every communicator one root with a constant magic: stragglers of an older incarnation could join",
        remedy="unset it; init_nccl computes the ids",
    ),
    Rule(
        "NCCL_PROTO", _never, unset=None, bad="warn",
        why="overrides what the tuner of aws-ofi-nccl chooses for each size", remedy="unset it, except while you measure",
    ),
    Rule(
        "NCCL_ALGO", _never, unset=None, bad="warn",
        why="overrides what the tuner of aws-ofi-nccl chooses for each size", remedy="unset it, except while you measure",
    ),
    Rule(
        "NCCL_P2P_DISABLE", _is("0"), unset=None, bad="warn",
        why="1 takes NVLink and PCIe away between the GPUs of a machine", remedy="unset it, except to look for a fault",
    ),
    Rule(
        "NCCL_SHM_DISABLE", _is("0"), unset=None, bad="warn",
        why="1 takes shared memory away between the GPUs of a machine", remedy="unset it, and give /dev/shm enough room",
    ),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", _is("0", "2"), unset="fail", bad="fail",
        why="with 1 or 3 torch's watchdog ends the process on the first error, and there is no survivor to recover with",
        remedy="enable init_nccl, which exports 0, or set it to 0",
    ),
    Rule(
        "TORCH_NCCL_ENABLE_MONITORING", _is("0"), unset="warn", bad="warn",
        why="torch's monitor kills a process whose watchdog does not move, as it may in an abort",
        remedy="enable init_nccl, which exports 0, or set it to 0",
    ),
)  # fmt: skip


def variables(inspection: Inspection) -> Iterator[Finding]:
    """Findings about every variable that has a rule, and then all others of these libraries that are set."""
    for rule in RULES:
        if (finding := judge(rule, inspection)) is not None:
            yield finding
    yield net_plugin(inspection)
    yield interfaces(inspection)
    judged = {*(rule.name for rule in RULES), "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"}
    reasons = {export.name: export.why for export in exports(efa=True, machine=_machine(inspection))}
    for name in sorted(set(inspection.environ) - judged):
        if name.startswith(_PREFIXES):
            why = reasons.get(name, "passed on to the workers as it is; this profile has no opinion of it")
            yield Finding(name, inspection.environ[name], _source(name, inspection), "ok", why)


def judge(rule: Rule, inspection: Inspection) -> Finding | None:
    """What is to be said of one variable."""
    value = inspection.environ.get(rule.name)
    status = rule.unset if value is None else "ok" if rule.good(value) else rule.bad
    if status is None:
        return None
    remedy = None if status == "ok" else rule.remedy
    return Finding(rule.name, _UNSET if value is None else value, _source(rule.name, inspection), status, rule.why, remedy)


def net_plugin(inspection: Inspection) -> Finding:
    """NCCL_NET_PLUGIN: a name, from which NCCL makes that of a library, or a path."""
    name, machine = "NCCL_NET_PLUGIN", _machine(inspection)
    value, source = inspection.environ.get(name), _source("NCCL_NET_PLUGIN", inspection)
    why = "which library NCCL loads for the network; with another one, or none, NCCL goes over TCP and says so only in its log"
    if value is None:
        return Finding(name, _UNSET, source, "warn", why, _EXPORTED.format("ofi"))
    if value.startswith("/") and not machine.exists(value):
        return Finding(
            name, value, source, "fail", f"there is no such file, and {why}", "give the path of aws-ofi-nccl's library, or 'ofi'"
        )
    if not {"ofi", "aws"} & set(value.lower().replace("/", "-").replace(".", "-").split("-")):
        known = value.endswith("libnccl-net.so")
        return Finding(name, value, source, "ok" if known else "fail", why, None if known else _EXPORTED.format("ofi"))
    return Finding(name, value, source, "ok", why)


def interfaces(inspection: Inspection) -> Finding:
    """NCCL_SOCKET_IFNAME, against the interfaces here: a list of prefixes, of whole names after ``=``, after ``^`` what to leave out."""
    name, here = "NCCL_SOCKET_IFNAME", _machine(inspection).names("/sys/class/net")
    value, source = inspection.environ.get(name), _source("NCCL_SOCKET_IFNAME", inspection)
    why = f"where NCCL's roots and rings meet, over TCP; this machine has {', '.join(here) or 'no interface'}"
    if value is None:
        return Finding(name, _UNSET, source, "ok", f"{why}; NCCL takes the first that is neither lo nor docker")
    negative, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]
    hit = [one for one in here if any(one == word if exact else one.startswith(word) for word in words)]
    left = [one for one in here if one not in hit] if negative else hit
    if left:
        return Finding(name, value, source, "ok", f"{why}; this leaves {', '.join(left)}")
    return Finding(name, value, source, "fail", f"{why}; this leaves none", "name an interface of this machine, or unset it")


def _machine(inspection: Inspection) -> Machine:
    return Machine(inspection.root, inspection.environ)


def _source(name: str, inspection: Inspection) -> str:
    return inspection.sources.get(name, "environment" if name in inspection.environ else "nowhere")
