"""The laws that every plugin keeps. Those of communicators need a GPU: see test_gpu.py."""

import pytest

from instep.testing import PluginContract
from instep_init_nccl.plugin import InitNccl

pytestmark = pytest.mark.timeout(180)  # real processes on a busy machine


class TestInitNccl(PluginContract):
    plugin = InitNccl
