"""The laws that this plugin keeps."""

from pathlib import Path

from instep.testing import DataContract, Script
from instep_mmap_loader.plugin import MmapLoaderPlugin

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_mmap.py"


class TestMmapLoaderPlugin(DataContract):
    plugin = MmapLoaderPlugin
    script = Script(str(EXAMPLE), ranks=3, steps=10)
