"""The laws that this plugin keeps."""

from collections.abc import Mapping
from typing import ClassVar

import pytest

from instep.model import Json
from instep.testing import StateContract
from instep_state_replica.plugin import StateReplica

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


class TestStateReplica(StateContract):
    plugin = StateReplica


class TestWithBuddies(StateContract):
    plugin = StateReplica
    settings: ClassVar[Mapping[str, Json]] = {"buddies": True}
