"""The kit for tests of scripts and plugins; nothing that trains in production imports it.

A plugin's author writes one class, and its name says what it must keep::

    from instep.testing import PluginContract

    class TestMyDetector(PluginContract):
        plugin = MyDetector

The pytest plugin (``pip install 'instep[testing]'``) adds the fixtures ``job``, ``faults``, ``incident`` and ``gloo_world``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from instep.testing.points import point

if TYPE_CHECKING:
    from instep.testing.comms import CommsContract
    from instep.testing.contract import PluginContract
    from instep.testing.data import DataContract
    from instep.testing.detector import DetectorContract
    from instep.testing.faults import Faults, Stage
    from instep.testing.jobs import Jobs, Script
    from instep.testing.state import StateContract
    from instep.testing.world import World

__all__ = [
    "CommsContract",
    "DataContract",
    "DetectorContract",
    "Faults",
    "Jobs",
    "PluginContract",
    "Script",
    "Stage",
    "StateContract",
    "World",
    "point",
]

_HOMES = {
    "PluginContract": "contract",
    "CommsContract": "comms",
    "StateContract": "state",
    "DataContract": "data",
    "DetectorContract": "detector",
    "Faults": "faults",
    "Stage": "faults",
    "Jobs": "jobs",
    "Script": "jobs",
    "World": "world",
}


def __getattr__(name: str) -> object:
    """Import a public name where it lives when it is first used: training scripts take ``point`` alone."""
    if name not in _HOMES:
        raise AttributeError(f"module 'instep.testing' has no attribute {name!r}")
    value: object = getattr(import_module(f"instep.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
