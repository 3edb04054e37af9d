"""The laws that this plugin keeps."""

from pathlib import Path

import pytest

from instep.testing import DataContract, Script
from instep_mmap_loader.plugin import MmapLoaderPlugin

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_mmap.py"

pytestmark = pytest.mark.timeout(180)  # real jobs on a busy machine


class TestMmapLoaderPlugin(DataContract):
    plugin = MmapLoaderPlugin
    script = Script(str(EXAMPLE), ranks=3, steps=10)

    @pytest.mark.full
    def test_a_second_fault_while_data_is_resumed(self) -> None:
        super().test_a_second_fault_while_data_is_resumed()

    @pytest.mark.full
    @pytest.mark.parametrize("phase", ["loader", "barrier", "after"])
    def test_the_next_batch_is_the_right_one(self, phase: str) -> None:
        super().test_the_next_batch_is_the_right_one(phase)
