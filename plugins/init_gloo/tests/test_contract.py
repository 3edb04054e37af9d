"""The laws that this plugin keeps."""

import pytest

from instep.testing import CommsContract
from instep_init_gloo.plugin import InitGloo

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


class TestInitGloo(CommsContract):
    plugin = InitGloo
