"""What workers must find in their environment before torch, NCCL and libfabric are loaded: each variable, its value and its reason."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from instep.errors import ConfigError
from instep_init_nccl.efa import plugin_library
from instep_init_nccl.machine import Machine

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Export:
    """A variable with the plugin's default for it, and why it is needed."""

    name: str
    value: str
    why: str


ROOTS = (Export("TORCH_NCCL_RANKS_PER_ROOT", "1", "a root for each rank, so that every id can be computed"),)
"""Read by torch when it makes a communicator."""

WATCHDOG = (
    Export("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "torch's watchdog would end the process on an error; instep aborts and goes on"),
    Export("TORCH_NCCL_ENABLE_MONITORING", "0", "torch's monitor would kill a process whose watchdog waits in an abort"),
    Export("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "an error that the watchdog throws in its own thread ends the process"),
    Export("TORCH_NCCL_PROPAGATE_ERROR", "0", "peers hear of a fault from instep, not through torch's store"),
)
"""torch must leave the process alone: whether it goes on is decided by the recovery."""

EFA = (
    Export("FI_PROVIDER", "efa", "libfabric uses EFA or fails, and never falls back to TCP unnoticed"),
    Export("FI_EFA_FORK_SAFE", "1", "loaders fork when the device is in use; kernels from 5.15 on need no help, and lose nothing by it"),
    Export("FI_EFA_USE_HUGE_PAGE", "0", "memory from huge pages cannot be shared with a fork, which then fails with ENOMEM"),
)
"""What libfabric needs in a process that forks loaders."""


def exports(*, efa: bool, machine: Machine) -> Iterator[Export]:
    """All defaults. With ``efa`` also NCCL_NET_PLUGIN: the path of the plugin where one is found, so that no search path is needed."""
    yield from ROOTS
    yield from WATCHDOG
    if efa:
        yield from EFA
        found = plugin_library(machine)
        yield Export("NCCL_NET_PLUGIN", str(found) if found else "ofi", "NCCL reaches EFA through aws-ofi-nccl only")


def environment(*, efa: bool, variables: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """The defaults, and ``variables`` of the configuration above them.

    Raises:
        ConfigError: a name in ``variables`` is none that an environment variable can have here.
    """
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"[plugins.init_nccl.variables] '{name}': names are upper case; from the shell, set the variable itself")
    return {export.name: export.value for export in exports(efa=efa, machine=machine)} | dict(variables)
