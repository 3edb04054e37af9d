"""The laws that this plugin keeps."""

import pytest

from instep.testing import StateContract
from instep_state_replica.plugin import StateReplica

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


class TestStateReplica(StateContract):
    plugin = StateReplica
