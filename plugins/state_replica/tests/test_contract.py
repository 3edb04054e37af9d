"""The laws that this plugin keeps."""

from instep.testing import StateContract
from instep_state_replica.plugin import StateReplica


class TestStateReplica(StateContract):
    plugin = StateReplica
