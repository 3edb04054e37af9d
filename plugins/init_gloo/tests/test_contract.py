"""The laws that this plugin keeps."""

from instep.testing import CommsContract
from instep_init_gloo.plugin import InitGloo


class TestInitGloo(CommsContract):
    plugin = InitGloo
