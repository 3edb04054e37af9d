"""The laws that every plugin keeps. This one needs no NeMo for them."""

import pytest

from instep.testing import PluginContract
from instep_nemo.plugin import Nemo

pytestmark = pytest.mark.timeout(180)  # real processes on a busy machine


class TestNemo(PluginContract):
    plugin = Nemo
